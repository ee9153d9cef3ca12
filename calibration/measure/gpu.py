"""The state of a GPU while it is measured, and what machine it is in. Nothing here changes a setting."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

#: Beginnings of the environment variables that figures may depend on.
TOLD = ("NCCL_", "TEARDOWN_CUPTI")
#: Bits of nvmlClocksThrottleReasons that say why a GPU runs below its highest clock.
REASONS = {
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
}


def _nvml() -> Any:
    """NVML's Python binding, ready to be asked; raises what keeps it from that."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def untold() -> str:
    """Why this machine's GPUs do not tell their clocks and power, in a line; empty where they do."""
    try:
        _nvml()
    except ModuleNotFoundError:
        return "NVML's Python binding is not installed (pip install nvidia-ml-py)"
    except Exception as error:
        return f"NVML: {error}"
    return ""


class Telemetry:
    """Clocks, power, temperature and reasons for a lowered clock, through NVML where its Python binding is there."""

    def __init__(self, index: int | None) -> None:
        self._nvml: Any = None
        if index is None:
            return
        try:
            nvml = _nvml()
            # NVML counts all GPUs of the machine, torch those that are visible.
            uuid = str(torch.cuda.get_device_properties(index).uuid)
            self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
            self._nvml = nvml
        except Exception:  # no binding, no permission, a driver of another age: measure without
            self._nvml = None

    def read(self) -> dict[str, object]:
        """sm_mhz, power_w, temp_c and, where the clock is held down, throttle; empty without NVML."""
        if self._nvml is None:
            return {}
        nvml = self._nvml
        try:
            reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
            throttle = "+".join(name for bit, name in REASONS.items() if reasons & bit)
            return {
                "sm_mhz": nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM),
                "power_w": round(nvml.nvmlDeviceGetPowerUsage(self._handle) * 1e-3),
                "temp_c": nvml.nvmlDeviceGetTemperature(self._handle, nvml.NVML_TEMPERATURE_GPU),
                **({"throttle": throttle} if throttle else {}),
            }
        except nvml.NVMLError:
            return {}


def environment(device: torch.device, world: int, command: str) -> dict[str, object]:
    """Return the machine and the software, of which a profile's provenance is made."""
    told: dict[str, object] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command,
        "ranks": world,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": _cpu(),
        "cpu_cores": os.cpu_count(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(TOLD)},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        told |= {
            "gpu": properties.name,
            "gpus": torch.cuda.device_count(),
            "sms": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            # NVLink SHARP, whose switches came with Hopper.
            "nvls": os.environ.get("NCCL_NVLS_ENABLE") != "0" and properties.major >= 9,
            "nvidia_smi": _smi(
                "--query-gpu=name,driver_version,vbios_version,clocks.max.sm,clocks.max.mem,power.limit,"
                "temperature.gpu,ecc.mode.current,persistence_mode",
                "--format=csv",
            ),
            "topology": _smi("topo", "-m"),
        }
    return told


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _smi(*arguments: str) -> list[str]:
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.rstrip() for line in done.stdout.splitlines() if line.strip()]
