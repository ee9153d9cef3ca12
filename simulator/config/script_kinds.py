"""How launch scripts of other tools are told: endings of names, and keys of those in YAML and JSON.

What reads them is in `launch_scripts`; here stands what errors about files in a wrong place ask too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

#: Endings of scripts that hold a command or a recipe, or torchtitan's sections.
COMMANDS = (".sh", ".bash", ".slurm", ".sbatch", ".py", ".toml")
#: Endings of files that are told by their keys alone.
KEYED = (".json", ".yaml", ".yml")


class ScriptKind(NamedTuple):
    """Keys at the top level of a kind of script, of which a file has all, or ``any_of`` them."""

    keys: frozenset[str]
    any_of: bool = False

    def matches(self, keys: Collection[str]) -> bool:
        """Return whether a file with these ``keys`` is of the kind.

        >>> AXOLOTL.matches({"base_model", "sequence_len", "adapter"}), AXOLOTL.matches({"base_model"})
        (True, False)
        """
        return bool(self.keys.intersection(keys)) if self.any_of else self.keys.issubset(keys)


AXOLOTL = ScriptKind(frozenset(("base_model", "sequence_len")))
LLAMA_FACTORY = ScriptKind(frozenset(("model_name_or_path", "finetuning_type")))
ACCELERATE = ScriptKind(frozenset(("distributed_type",)))
DEEPSPEED = ScriptKind(
    frozenset(("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")), any_of=True
)
#: In the order in which a file is tried.
SCRIPT_KINDS = (AXOLOTL, LLAMA_FACTORY, ACCELERATE, DEEPSPEED)
