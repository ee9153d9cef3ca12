"""Files of other projects, not ours to ship: where they are at hand each is read, or gets the right message."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

from simulator.config import load_workload
from simulator.config.misplaced_file import refuse_misplaced, use_of
from simulator.errors import InputError
from simulator.importers.reading import read_topology
from simulator.schedule_alone import schedule

FILES = Path(__file__).resolve().parents[3] / "shared/reference/files"
#: What a file is called, by the first pattern of its path that fits.
KINDS = {
    "nccl_xml/*": "a topology",
    "nvidia_smi_topo/*": "a topology",
    "hf/*": "a model of Hugging Face",
    "schedules/*": "a pipeline schedule",
    "traces/azure*": "a list of requests",
    "traces/vidur*": "a list of requests",
    "traces/*.jsonl": "a list of requests",
    "*.csv": "a table",
    "*.csv.gz": "a table",
    "traces/bytedance_trace*": "a Parquet table",
    "*.tgz": "an archive",
    "*.tar.gz": "an archive",
    "chakra/*": "an execution trace",
    "*.et": "an execution trace",
    "*_et*": "an execution trace",
    "kineto/*": "a trace of PyTorch's profiler",
    "traces/*.json.gz": "a trace of PyTorch's profiler",
}
#: Results of a study, the schema of a format, and the notes beside the files.
UNKNOWN = ("traces/bytedance_result*", "*.proto", "ORIGINS.md")
NAMES = [str(path.relative_to(FILES)) for path in sorted(FILES.rglob("*")) if path.is_file()]


@pytest.mark.skipif(not NAMES, reason="files of other projects are not at hand")
def test_every_file_is_called_what_it_is() -> None:
    assert len(NAMES) >= 35
    for name in NAMES:
        kind = next((kind for pattern, kind in KINDS.items() if fnmatch(name, pattern)), None)
        use = use_of(FILES / name)
        if any(fnmatch(name, pattern) for pattern in UNKNOWN):
            assert use is None, name
        else:
            assert kind is not None, name
            assert use is not None, name
            assert use.kind.startswith(kind), name


@pytest.mark.skipif(not NAMES, reason="files of other projects are not at hand")
def test_every_file_is_read_or_refused_with_one_message_where_a_topology_is_asked_for() -> None:
    for name in NAMES:
        path = FILES / name
        if name.startswith(("nccl_xml", "nvidia_smi_topo")):
            assert read_topology(path).cluster["node"]["gpus"]["count"] > 0
            continue
        try:
            refuse_misplaced(path, "a topology")
        except InputError as error:
            assert error.fix  # noqa: PT017
        else:
            assert any(fnmatch(name, pattern) for pattern in UNKNOWN), name
            with pytest.raises(InputError, match="is no topology that is known here"):
                read_topology(path)


@pytest.mark.skipif(not NAMES, reason="files of other projects are not at hand")
def test_every_config_is_a_model_and_every_order_a_schedule() -> None:
    for name in NAMES:
        if name.startswith("hf/"):
            model = {"hf_config": str(FILES / name)}
            assert load_workload("gpt22b_tp8", {"model": model, "parallelism.tp": 1}).model.layers > 0
        if name.startswith("schedules/"):
            assert schedule(str(FILES / name)).stages == 2


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("small.json", '{"workload_graph": [{"Id": 1}]}', "an execution trace"),
        ("requests.jsonl", '{"timestamp": 0, "input_length": 4, "output_length": 6}\n', "a list of requests"),
        ("requests.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n0,374,44\n", "a list of requests"),
        ("table.csv", "id,seq\n0,ContextTokens\n", "a table"),
    ],
)
def test_files_like_these_are_called_so(name: str, text: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    use = use_of(path)
    assert use is not None
    assert use.kind.startswith(kind)
