"""A headless Chromium, driven by its own protocol (chromedevtools.github.io/devtools-protocol), for tests of pages."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
#: Seconds that a page may take for anything.
PATIENCE_S = 60.0


class Tab:
    """One page in a browser: expressions are evaluated in it, pointers moved, requests to the network listed."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self.requests: list[str] = []
        self.problems: list[str] = []

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._connection.write_message(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(await self._connection.read_message())
            if message.get("method") == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            if message.get("method") == "Runtime.exceptionThrown":
                self.problems.append(message["params"]["exceptionDetails"]["text"])
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return dict(message["result"])

    async def value(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        result = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, expression: str) -> Any:
        """The value of an expression as soon as it is true."""
        for _ in range(int(PATIENCE_S / 0.1)):
            if found := await self.value(expression):
                return found
            await asyncio.sleep(0.1)
        raise AssertionError(f"never came true: {expression}; problems: {self.problems}")

    async def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)


@asynccontextmanager
async def tab(page: Path, folder: Path, width: int, height: int) -> AsyncIterator[Tab]:
    """A tab with the file ``page``; the browser keeps its files in ``folder``."""
    from tornado.websocket import websocket_connect

    command = [
        str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
        f"--user-data-dir={folder}", f"--window-size={width},{height}", "about:blank",
    ]  # fmt: skip
    browser = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        assert browser.stderr is not None
        port = next(found[1] for line in browser.stderr if (found := re.search(r"listening on ws://[^:]+:(\d+)", line)))
        pages = await _pages(int(port))
        connection = await websocket_connect(pages, max_message_size=2**28)
        one = Tab(connection)
        for domain in ("Network", "Runtime", "Page"):
            await one.send(f"{domain}.enable")
        await one.send("Page.navigate", url=page.as_uri())
        yield one
        connection.close()
    finally:
        browser.terminate()
        browser.communicate()


async def _pages(port: int) -> str:
    """The address of the browser's first tab."""
    from tornado.httpclient import AsyncHTTPClient

    answer = await AsyncHTTPClient().fetch(f"http://127.0.0.1:{port}/json/list")
    return str(next(one["webSocketDebuggerUrl"] for one in json.loads(answer.body) if one["type"] == "page"))


def drive(visit: Callable[[], Awaitable[None]]) -> None:
    """Run a visit to a page to its end."""
    asyncio.run(_with_patience(visit))


async def _with_patience(visit: Callable[[], Awaitable[None]]) -> None:
    await asyncio.wait_for(visit(), 3 * PATIENCE_S)
