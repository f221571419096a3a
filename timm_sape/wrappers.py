"""The model inside a wrapper."""
from typing import Any

from timm.utils import ModelEma, ModelEmaV2, ModelEmaV3
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

__all__ = ['unwrapped']

WRAPPERS = AveragedModel, DataParallel, DistributedDataParallel, ModelEmaV2, ModelEmaV3


def unwrapped(model: Any) -> Any:
    """The model inside wrappers that compute the same: DDP, `torch.compile`, averages of weights, peft.

    Others are returned as they are. They may compute something else, or, as FSDP, have to be called. timm's
    `unwrap_model` opens whatever has a `module`.
    """
    if isinstance(model, ModelEma):
        return unwrapped(model.ema)
    if isinstance(model, WRAPPERS):
        return unwrapped(model.module)
    if '_orig_mod' in getattr(model, '_modules', ()):
        return unwrapped(model._orig_mod)
    return unwrapped(model.get_base_model()) if callable(getattr(model, 'get_base_model', None)) else model
