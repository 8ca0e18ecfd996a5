"""parallel3d: transformer training with tensor, pipeline, data and context parallelism.

The names in `__all__` are the public interface, which docs/library.md explains; everything else is
private. A name is imported at its first use, so `import parallel3d` alone does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallel3d.blueprint.layout import Layout
    from parallel3d.build import Trainer
    from parallel3d.cli.fit import fit
    from parallel3d.cli.overrides import compose
    from parallel3d.comm.process_groups import ProcessGroups
    from parallel3d.commands.verify import verify
    from parallel3d.data.corpus import open_corpus
    from parallel3d.data.sampler import Sample
    from parallel3d.data_parallel.ddp import DistributedDataParallel
    from parallel3d.errors import Parallel3dError
    from parallel3d.library.grad_norm import (
        check_replicated,
        clip_grad_norm_,
        sum_gradients_over,
    )
    from parallel3d.library.init import init
    from parallel3d.library.module_pipeline import Pipeline
    from parallel3d.library.sequences import SplitSequences, context_parallel_attention
    from parallel3d.library.state_dicts import full_state_dict, sharded_state_dict
    from parallel3d.library.training_state import load, save
    from parallel3d.loop.hooks import Hook, Run
    from parallel3d.models.cross_entropy import vocab_parallel_cross_entropy
    from parallel3d.models.layer_inputs import Inputs
    from parallel3d.models.own_loss import Loss
    from parallel3d.models.own_model import Model, Parallel
    from parallel3d.run_config import Config, check_config
    from parallel3d.tensor_parallel.embedding import VocabParallelEmbedding
    from parallel3d.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

__version__ = "0.2.0"

__all__ = [
    "ColumnParallelLinear",
    "Config",
    "DistributedDataParallel",
    "Hook",
    "Inputs",
    "Layout",
    "Loss",
    "Model",
    "Parallel",
    "Parallel3dError",
    "Pipeline",
    "ProcessGroups",
    "RowParallelLinear",
    "Run",
    "Sample",
    "SplitSequences",
    "Trainer",
    "VocabParallelEmbedding",
    "__version__",
    "check_config",
    "check_replicated",
    "clip_grad_norm_",
    "compose",
    "context_parallel_attention",
    "fit",
    "full_state_dict",
    "init",
    "load",
    "open_corpus",
    "save",
    "sharded_state_dict",
    "sum_gradients_over",
    "verify",
    "vocab_parallel_cross_entropy",
]

_HOME = {
    "ColumnParallelLinear": "parallel3d.tensor_parallel.layers",
    "Config": "parallel3d.run_config",
    "DistributedDataParallel": "parallel3d.data_parallel.ddp",
    "Hook": "parallel3d.loop.hooks",
    "Inputs": "parallel3d.models.layer_inputs",
    "Layout": "parallel3d.blueprint.layout",
    "Loss": "parallel3d.models.own_loss",
    "Model": "parallel3d.models.own_model",
    "Parallel": "parallel3d.models.own_model",
    "Parallel3dError": "parallel3d.errors",
    "Pipeline": "parallel3d.library.module_pipeline",
    "ProcessGroups": "parallel3d.comm.process_groups",
    "RowParallelLinear": "parallel3d.tensor_parallel.layers",
    "Run": "parallel3d.loop.hooks",
    "Sample": "parallel3d.data.sampler",
    "SplitSequences": "parallel3d.library.sequences",
    "Trainer": "parallel3d.build",
    "VocabParallelEmbedding": "parallel3d.tensor_parallel.embedding",
    "check_config": "parallel3d.run_config",
    "check_replicated": "parallel3d.library.grad_norm",
    "clip_grad_norm_": "parallel3d.library.grad_norm",
    "compose": "parallel3d.cli.overrides",
    "context_parallel_attention": "parallel3d.library.sequences",
    "fit": "parallel3d.cli.fit",
    "full_state_dict": "parallel3d.library.state_dicts",
    "init": "parallel3d.library.init",
    "load": "parallel3d.library.training_state",
    "open_corpus": "parallel3d.data.corpus",
    "save": "parallel3d.library.training_state",
    "sharded_state_dict": "parallel3d.library.state_dicts",
    "sum_gradients_over": "parallel3d.library.grad_norm",
    "verify": "parallel3d.commands.verify",
    "vocab_parallel_cross_entropy": "parallel3d.models.cross_entropy",
}


# Public names of earlier versions, with what to use instead.
_GONE = {"UserError": "use Parallel3dError", "Worker": "verify(config) needs none"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        hint = f"; {_GONE[name]}" if name in _GONE else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    from parallel3d.versions import OF_A_SCRIPT, check_versions

    check_versions(OF_A_SCRIPT)
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # later look-ups do not call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
