"""``init``: a first workload file, from a few answers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from simulator.cli.options import Json, Quiet
from simulator.cli.outputs import check_outputs, shows_summary, write_json
from simulator.cli.search import search_watch
from simulator.cli.streams import complain
from simulator.cli.terminal import progress, say, warn
from simulator.errors import InputError, amended

if TYPE_CHECKING:
    from simulator.drafting.entry import Draft, JobAnswers
    from simulator.drafting.machines import JobMachines

T = TypeVar("T")
#: Beginning of a key of workload files -> the option that it follows from.
_OPTIONS = {
    "training.seq": "--seq",
    "training.micro_batch": "--seq",
    "training.global_batch": "--batch",
    "training": "--training",
    "model": "--model",
    "framework": "--framework",
    "cluster": "--cluster",
    "calibration": "--cluster",
}
#: How often a question is asked where the answer cannot be used.
_TRIES = 5

ModelAnswer = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="A shipped model, an id of Hugging Face, or a config.json."),
]
MachineAnswers = Annotated[
    list[str] | None,
    typer.Option(
        "--cluster",
        metavar="NAME",
        help="A shipped cluster, a cluster file, a type of GPU, or a file that nvidia-smi -q, nvidia-smi topo -m, "
        "ibstat or squeue wrote (repeatable).",
    ),
]
GpuAnswer = Annotated[int | None, typer.Option("--gpus", metavar="N", help="How many GPUs train.")]
MethodAnswer = Annotated[str | None, typer.Option("--training", metavar="HOW", help="full, lora, qlora or fp8.")]
FrameworkAnswer = Annotated[str | None, typer.Option("--framework", metavar="NAME", help="Whose software trains.")]
LengthAnswer = Annotated[str | None, typer.Option("--seq", metavar="N", help="Tokens per sequence: 4096, or 4k.")]
BatchAnswer = Annotated[str | None, typer.Option("--batch", metavar="N", help="Sequences per step, on all GPUs.")]
JobFile = Annotated[Path, typer.Option("--out", metavar="FILE", help="The workload file to write (.yaml, .yml).")]
UsualAnswers = Annotated[bool, typer.Option("--yes", help="Ask nothing: what no option says is as usual.")]
DraftBudget = Annotated[float, typer.Option("--budget-s", metavar="S", help="Seconds for the search of a layout.")]
DraftProcesses = Annotated[int | None, typer.Option(metavar="N", help="Processes. [one per core]", show_default=False)]


def command(
    model: ModelAnswer = None,
    cluster: MachineAnswers = None,
    gpus: GpuAnswer = None,
    training: MethodAnswer = None,
    framework: FrameworkAnswer = None,
    seq: LengthAnswer = None,
    batch: BatchAnswer = None,
    out: JobFile = Path("job.yaml"),
    yes: UsualAnswers = False,
    budget_s: DraftBudget = 60.0,
    jobs: DraftProcesses = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Ask a few questions, and write a workload file that runs.

    What an option says is not asked. A layout that fits is searched for among simple schedules, and stands in the file
    with a comment beside each key. Machines that are read from outputs of commands get a cluster file of their own.

    \b
    Examples:
      llmsim init
      llmsim init --model Qwen/Qwen2.5-7B --cluster dgx_h100 --gpus 64 --yes
      llmsim init --model llama2-7b --cluster smi-q.txt --training lora
    """
    if not budget_s > 0:
        raise InputError("must be a number of seconds", file="--budget-s", found=budget_s, allowed="> 0")
    cluster_file = out.with_name(f"{out.stem}-cluster{out.suffix}")
    _check_files(out, cluster_file, json)
    ask = Interview(yes)
    answers = _answers(ask, model, cluster, gpus, training, framework, seq, batch)
    imported = answers.machines.imported
    with progress("searching a layout") as far:
        from simulator.drafting.entry import draft

        target = Path(cluster_file.name) if imported else None
        with amended(_by_option):
            result = draft(answers, out.stem, target, out.parent, budget_s=budget_s, jobs=jobs, watch=search_watch(far))
    _write(result, answers, out, cluster_file)
    write_json(json, _content(result, out, cluster_file if imported else None))
    warn(f"assumed: {text}" for text in (imported.assumed if imported else ()))
    warn(_doubts(result, answers, budget_s))
    if shows_summary(json, quiet):
        _show(result, answers, out, cluster_file if imported else None)


def _by_option(error: InputError) -> None:
    """Name the option that an error of the file is about, as nobody has written the file's keys.

    What would mend the file is then left out.
    """
    if error.file == "search":
        error.file, error.fix = "--gpus", "another number of GPUs, or a --batch that they share evenly"
        return
    option = next((one for key, one in _OPTIONS.items() if (error.key or "").startswith(key)), None)
    if error.file is None and option is not None:
        error.file, error.key, error.fix = option, None, None


class Interview:
    """Questions on standard error, answered on standard input; ``usual``: every answer is the usual one."""

    def __init__(self, usual: bool) -> None:
        self.usual = usual

    def ask(self, question: str, option: str, usual: str, read: Callable[[str], T], answer: str | None = None) -> T:
        """Return what ``read`` makes of an answer: of the option's, or of the one that is asked for.

        An empty line means ``usual``. On a terminal what cannot be used is asked for again. Raises `InputError`.
        """
        if answer is not None:
            return _named(read, answer, option)
        if self.usual:
            return _named(read, usual, option)
        for _ in range(_TRIES):
            print(f"{question} [{usual}]: ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            if not line:
                print(file=sys.stderr)
                raise InputError("is not answered, and the input is at its end", file=option, fix=f"{option}, or --yes")
            try:
                return _named(read, line.strip() or usual, option)
            except InputError as error:
                if not sys.stdin.isatty():
                    raise
                complain(str(error))
        raise InputError(f"has no answer that can be used after {_TRIES} of them", file=option)


def _named(read: Callable[[str], T], text: str, option: str) -> T:
    """Return what ``read`` makes of a text. Raises `InputError` that names the option."""
    try:
        return read(text)
    except InputError as error:
        if error.file is None or error.file == option.removeprefix("--"):
            error.file = option
        raise


def _count(text: str, most: int = 10**9) -> int:
    """Return a whole number above 0, of ``most`` or less. Raises `InputError` for anything else."""
    if not text.isascii() or not text.isdecimal() or not 0 < int(text[:12]) <= most:
        raise InputError("must be a whole number", found=text, allowed=f">= 1, <= {most:,}")
    return int(text)


def _length(text: str) -> int:
    """Return a number of tokens, of which 4k are 4,096. Raises `InputError`."""
    from simulator.quantities import read_length

    return read_length(text, "seq")


def _batch(length: int, text: str) -> int:
    """Return a number of sequences of so many tokens, which are not counted in tokens. Raises `InputError`."""
    from simulator.quantities import has_foreign_unit, in_sequences

    if has_foreign_unit(text):
        raise InputError("counts sequences, without a unit", file="batch", found=text, fix=in_sequences(text, length))
    return _count(text)


def _text(number: int | None) -> str | None:
    return None if number is None else str(number)


def _answers(
    interview: Interview,
    model: str | None,
    cluster: list[str] | None,
    gpus: int | None,
    training: str | None,
    framework: str | None,
    seq: str | None,
    batch: str | None,
) -> JobAnswers:
    """Return all answers, each by its option, by the usual one, or asked for in turn. Raises `InputError`."""
    from simulator.bounds import MAX_GPUS
    from simulator.drafting import methods
    from simulator.drafting.entry import JobAnswers
    from simulator.drafting.machines import job_machines
    from simulator.drafting.model_names import model_section
    from simulator.frameworks import FRAMEWORKS
    from simulator.importers import is_foreign

    def checked_model(text: str) -> str:
        model_section(text)
        return text

    def machines_of(text: str) -> JobMachines:
        files = text.split()
        return job_machines(files if any(is_foreign(Path(one)) for one in files) else [text], gpus)

    def checked_count(text: str, machines: JobMachines) -> int:
        number = _count(text, MAX_GPUS)
        machines.for_gpus(number).spec(number)
        return number

    ask = interview.ask
    name = ask(
        "Model: a shipped one, an id of Hugging Face, or a config.json", "--model", "llama3-8b", checked_model, model
    )
    if cluster:
        machines = _named(lambda text: job_machines(cluster, gpus), "", "--cluster")
    else:
        question = "Machines: a shipped cluster, a type of GPU, or files of nvidia-smi, ibstat and squeue"
        machines = ask(question, "--cluster", "dgx_h100", machines_of)
    number = ask("GPUs", "--gpus", str(machines.spec().n_gpus), lambda text: checked_count(text, machines), _text(gpus))
    machines = machines.for_gpus(number)
    method = ask(
        f"Training: {', '.join(methods.METHODS)}",
        "--training",
        methods.FULL,
        lambda text: methods.chosen("training", text, methods.METHODS),
        training,
    )
    software = ask(
        f"Framework: {', '.join(FRAMEWORKS)}",
        "--framework",
        methods.usual_framework(method, number),
        lambda text: methods.chosen("framework", text, FRAMEWORKS),
        framework,
    )
    length = ask("Tokens per sequence", "--seq", str(methods.METHODS[method].seq), _length, seq)
    sequences = ask("Sequences per step", "--batch", str(methods.usual_batch(number)), partial(_batch, length), batch)
    return JobAnswers(name, machines, number, method, software, length, sequences)


def _check_files(out: Path, cluster_file: Path, json: Path | None) -> None:
    """Raise `InputError` where a file cannot be written, or is there already."""
    check_outputs({"--out": out, "--json": json}, {"--out": (".yaml", ".yml")})
    for path in (out, cluster_file):
        if path.exists():
            raise InputError("is there already", file=path, fix="--out NAME.yaml, for a file of another name")


def _write(result: Draft, answers: JobAnswers, out: Path, cluster_file: Path) -> None:
    """Write the workload file, and the cluster file where machines were read from outputs of commands."""
    from simulator.cli.importing import cluster_file as cluster_text
    from simulator.config import load_workload
    from simulator.output.files import writing

    if imported := answers.machines.imported:
        data = {**imported.cluster, "assumed": list(imported.assumed)}
        with writing(cluster_file) as file:
            file.write(cluster_text(data, answers.machines.files, imported.format).encode())
    with writing(out) as file:
        file.write(result.text.encode())
    load_workload(out)


def _content(result: Draft, out: Path, cluster_file: Path | None) -> dict[str, object]:
    from simulator.output.envelope import envelope

    layout = result.layout
    return envelope(
        "init",
        file=str(out),
        cluster_file=None if cluster_file is None else str(cluster_file),
        workload=result.data,
        layout=dict(layout.changes),
        figures=dict(layout.figures),
        n_legal=layout.n_legal,
        n_simulated=layout.n_simulated,
        in_time=layout.in_time,
        idle_gpus=result.idle_gpus,
    )


def _doubts(result: Draft, answers: JobAnswers, budget_s: float) -> Iterator[str]:
    """Yield what a user would not expect of the layout: little memory left, idle GPUs, a search that was cut short."""
    from simulator.drafting.job_file import tight_memory
    from simulator.drafting.layouts import SPARE
    from simulator.units import counted

    if result.without_encoder:
        yield f"the model is simulated without its encoder of images: {result.without_encoder}"
    if result.layout.spare < SPARE:
        yield tight_memory(result.layout)
    if idle := result.idle_gpus:
        whole = answers.gpus + idle
        yield f"{counted(idle, 'GPU')} of the {whole} in whole nodes stay idle; --gpus {whole} uses all of them"
    if not result.layout.in_time:
        yield f"the search ended after --budget-s {budget_s:g}: layouts that were not simulated may be faster"


def _show(result: Draft, answers: JobAnswers, out: Path, cluster_file: Path | None) -> None:
    from simulator.drafting.job_file import layout_keys, step_text, trust
    from simulator.output.search_table import layout_text
    from simulator.units import counted, format_gib

    layout, figures = result.layout, result.layout.figures
    legal = f"{counted(layout.n_legal, 'legal layout')} with simple schedules, {layout.n_simulated:,} simulated"
    say(f"{answers.model} on {counted(answers.gpus, 'GPU')}: {legal}")
    sections = layout_keys(layout.changes).items()
    keys = {f"{section}.{key}": value for section, values in sections for key, value in values.items()}
    say(f"  {layout_text(keys)}")
    say(
        f"  a step of {step_text(figures)}, {figures['tokens_per_s']:,.0f} tokens/s, "
        f"{format_gib(figures['peak_bytes'])} of {format_gib(figures['capacity_bytes'])} on the fullest GPU"
    )
    say(f"  {trust(figures)}")
    for path in (out, cluster_file):
        if path is not None:
            say(f"written: {path}")
    say(f"next:    llmsim run {out}")
    say("all schedules and layouts:")
    say(f"         llmsim search {out} --gpus {answers.gpus}")
