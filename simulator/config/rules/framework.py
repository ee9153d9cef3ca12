"""Rules of the framework: keys and features that it lacks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from simulator.config.section import Section
from simulator.errors import Bare, InputError, written
from simulator.frameworks import FRAMEWORKS, Framework
from simulator.frameworks.framework import UnfusedPart
from simulator.frameworks.limits import Limit
from simulator.input_files import brief
from simulator.losses import LOSSES

if TYPE_CHECKING:
    from simulator.config.model import Model
    from simulator.config.workload import Workload


def choice_problems(workload: Workload) -> Iterator[InputError]:
    """Yield keys of the section ``framework`` that the framework does not know."""
    choice = workload.framework
    framework = FRAMEWORKS[choice.name]
    if workload.model.captured and not framework.runs_captured:
        yield InputError(
            "captured models run as PyTorch runs modules",
            key="framework",
            found=choice.name,
            allowed=_those(lambda one: one.runs_captured),
        )
        return
    if choice.version is not None and not framework.before:
        yield InputError(
            f"nothing that is simulated of {choice.name} depends on its version",
            key="framework.version",
            found=choice.version,
            allowed=f"null, or framework: {_those(lambda one: bool(one.before))}",
        )
    if choice.compile and framework.compiled is None:
        yield InputError(
            f"{choice.name} is not simulated under torch.compile",
            key="framework.compile",
            found=brief(True),
            allowed=f"false, or framework: {_those(lambda one: one.compiled is not None)}",
        )


def problems(workload: Workload) -> Iterator[InputError]:
    """Keys of the training section that the framework does not know."""
    training, software = workload.training, workload.software
    if training.gradient_accumulation_fusion and not software.adds_in_products:
        yield InputError(
            f"the products of {workload.framework.title} do not add to a buffer",
            key="training.gradient_accumulation_fusion",
            found=brief(True),
            allowed=f"false, or framework: {_those(lambda one: one.adds_in_products)}",
        )
    yield from _loss_problems(workload)
    if not training.fused_rms_norm and (software.rms_norm_by_operations is None or workload.model.norm != "rmsnorm"):
        able = _those(lambda one: one.rms_norm_by_operations is not None)
        yield InputError(
            f"{workload.model.norm} of {workload.framework.title} is one kernel",
            key="training.fused_rms_norm",
            found=brief(False),
            allowed=f"true, or framework: {able} and norm: rmsnorm",
        )


def _fuses_permutation(software: Framework) -> bool:
    """Return whether a kernel of its own can permute tokens: Megatron-Core's, of Transformer Engine."""
    return software.has_core_experts and not software.experts.one_by_one


def _permutation_problems(workload: Workload) -> Iterator[InputError]:
    """Yield where tokens cannot be permuted as the workload says."""
    software, fused = workload.software, workload.training.fused_permutation
    if fused:
        if workload.model.moe and software.experts.one_by_one:
            yield InputError(
                f"{workload.framework.title} has no fused permutation",
                key="training.fused_permutation",
                found=brief(True),
                allowed=f"false, or framework: {_those(_fuses_permutation)}",
            )
        return
    if workload.model.moe and software.experts.one_by_one:
        return  # its experts permute by PyTorch's kernels; whatever else stands in the way has another key
    if not (software.has_core_experts and workload.model.moe and workload.parallelism.dispatcher == "all_to_all"):
        yield InputError(
            "only Megatron-Core's all-to-all dispatcher permutes by PyTorch's kernels where experts are",
            key="training.fused_permutation",
            found=brief(False),
            allowed=f"true, or framework: {_those(lambda one: one.has_core_experts)}, with experts and all_to_all",
        )


def _lacks(model: Model, part: UnfusedPart) -> str:
    """Return what a model lacks to have ``part``, "" where it has it. Latent attention has biases nowhere."""
    attending = [mixer.attends for mixer in model.kinds if mixer.attends]
    match part:
        case "qkv_bias" if model.mla or not attending:
            return "attention that is not latent (mla: null)"
        case "qkv_bias":
            return "" if "qkv" in model.biases else "biases: [qkv]"
        case "rotation" if model.position != "rope":
            return "position: rope"
        case "rotation":
            turned = any(attends.rotates for attends in attending)
            return "" if turned or model.mla else "mixers that rotate queries and keys"
        case "router":
            return "" if model.moe else "experts"


def _runs_by_operations(part: UnfusedPart) -> Callable[[Framework], bool]:
    """Return what tells of a framework whether it can run ``part`` operation by operation."""
    return lambda one: part in dict(one.by_operations)


def _unfused_problems(workload: Workload) -> Iterator[InputError]:
    """Yield parts that are to run operation by operation, and that have no fused kernel in this job."""
    able = dict(workload.software.by_operations)
    for part in workload.training.unfused:
        lacking = _lacks(workload.model, part)
        if lacking or part not in able:
            yield InputError(
                f"{workload.framework.title} has no fused {part} in this model",
                key="training.unfused",
                found=part,
                allowed=f"framework: {_those(_runs_by_operations(part))}" + (f", with {lacking}" if lacking else ""),
            )


def _gather_problems(workload: Workload) -> Iterator[InputError]:
    """Yield a gather for each product in a framework that is not simulated with it, and where no layer is split."""
    layout = workload.parallelism
    if not layout.gather_per_product:
        return
    if layout.tp > 1 and not layout.sequence_parallel:
        yield InputError(
            "nothing is gathered where every rank has all rows",
            key="parallelism.gather_per_product",
            found=brief(True),
            allowed="false, or sequence_parallel: true",
        )
    if not workload.software.gathers_by_product:
        able = _those(lambda one: one.split is not None and one.split.gathers_by_product)
        yield InputError(
            "products of split layers alone gather their rows"
            if layout.tp == 1
            else f"{workload.framework.title} gathers rows once for all products that read them",
            key="parallelism.gather_per_product",
            found=brief(True),
            allowed=f"false, or framework: {able}, with tp > 1",
        )


def _balancing_problems(workload: Workload) -> Iterator[InputError]:
    """Yield a loss that balances experts in a framework whose kernels for it are not known here."""
    moe = workload.model.moe
    if moe and moe.balancing_loss and not workload.software.has_core_experts:
        yield InputError(
            f"{workload.framework.title} is simulated without a loss that balances experts",
            key="model.moe.balancing_loss",
            found=brief(True),
            allowed=f"false, or framework: {_those(lambda one: one.has_core_experts)}",
        )


def layout_problems(workload: Workload) -> Iterator[InputError]:
    """Yield what the framework is not simulated with, when every default has its value."""
    yield from _permutation_problems(workload)
    yield from _balancing_problems(workload)
    yield from _unfused_problems(workload)
    yield from _gather_problems(workload)

    recorded = bool(workload.model.captured)
    broken: dict[str, list[Limit]] = {}
    for limit in workload.software.limits:
        if recorded and limit.key.startswith("model."):  # of layers that the framework would make
            continue
        if _breaks(workload, limit):
            broken.setdefault(limit.message, []).append(limit)
    for limits in broken.values():
        yield _limit_problem(workload, limits)


def _value(workload: Workload, key: str) -> object:
    """Return the value of a dotted key, None where its section is left out."""
    section: object = workload
    for name in key.split("."):
        section = getattr(section, name) if section is not None else None
    return section


def _breaks(workload: Workload, limit: Limit) -> bool:
    """Return whether a limit holds for a job, and does not allow its value."""
    holds = all(_value(workload, key) == value for key, value in limit.where.items())
    return holds and not limit.allows(_value(workload, limit.key))


def _limit_problem(workload: Workload, limits: Sequence[Limit]) -> InputError:
    """Return the error of limits of one message; several are of one section, each key with its value."""
    values = {limit.key: _value(workload, limit.key) for limit in limits}
    shown = {
        key: brief(value) if not isinstance(value, Section) else Bare("a section") for key, value in values.items()
    }
    allowed = {limit.key: " or ".join(str(brief(value)) for value in limit.allowed) for limit in limits}
    key, actual = limits[0].key, shown[limits[0].key]
    if len(values) > 1:
        key = key.partition(".")[0]
        within = {name: name.removeprefix(f"{key}.") for name in values}
        actual = Bare(", ".join(f"{within[name]}: {written(value)}" for name, value in shown.items()))
        allowed = {name: f"{within[name]}: {text}" for name, text in allowed.items()}
    return InputError(
        f"framework {workload.framework.title}: {limits[0].message}",
        key=key,
        found=actual,
        allowed=", ".join(allowed.values()),
        fix=_with_these(workload, values),
    )


def _with_these(workload: Workload, keys: Collection[str]) -> str | None:
    """Return the frameworks that are simulated with a job's values of ``keys``, as what to write; None: none is.

    Limits for values of other sections than the model do not count, as their defaults are the framework's; those that
    lack the job's kind of adapters do. Such a framework is tried before it is told, see `tried_fixes`.
    """

    def refuses(one: Framework) -> bool:
        limits = [limit for limit in one.limits if limit.key in keys]
        lasting_limits = [limit for limit in limits if all(key.startswith("model.") for key in limit.where)]
        adapters = workload.training.adapters
        if adapters and adapters.method not in one.adapter_kinds:
            return True
        return any(_breaks(workload, limit) for limit in lasting_limits)

    names = _those(lambda one: not refuses(one), besides=workload.framework.name)
    return f"framework: {names}" if names else None


def _loss_problems(workload: Workload) -> Iterator[InputError]:
    """Losses that the framework has not, options that a loss has not, and vocabularies that it cannot split."""
    choice, layout = workload.training.loss, workload.parallelism
    named = choice.name if "name" in choice.model_fields_set else ""
    if named and named not in workload.software.losses:
        yield InputError(
            f"is none of the losses of {workload.framework.title}",
            key="training.loss",
            found=named,
            allowed=", ".join(workload.software.losses),
        )
        return
    chunked = [name for name, loss in LOSSES.items() if loss.takes_options]
    usual = {
        "chunks": type(choice).model_fields["chunks"].default,
        "recompute": False,
        "compile": workload.framework.compile,
    }
    for option, value in usual.items():
        if named not in chunked and option in choice.model_fields_set and getattr(choice, option) != value:
            yield InputError(
                f"is of a loss that works chunk by chunk, which {named or 'this'} does not",
                key=f"training.loss.{option}",
                found=brief(getattr(choice, option)),
                allowed=f"{brief(value)}, or name: {' or '.join(chunked)}",
            )
    if choice.metrics and not LOSSES[choice.name].leaves_logits:
        yield InputError(
            f"{choice.name} leaves no logits of a micro-batch behind it",
            key="training.loss.metrics",
            found=choice.metrics,
            allowed="0, or another loss",
        )
    if named and not LOSSES[named].splits_vocabulary and layout.tp > 1 and layout.vocab_parallel:
        yield InputError(
            f"{named} needs the logits of the whole vocabulary",
            key="training.loss",
            found=named,
            allowed="vocab_parallel: false, tp: 1, or another loss",
            fix="vocab_parallel: false",
        )


def _those(able: Callable[[Framework], bool], besides: str = "") -> str:
    """Return the names of the frameworks that are ``able``, ``besides`` one."""
    return " or ".join(name for name, framework in FRAMEWORKS.items() if name != besides and able(framework))
