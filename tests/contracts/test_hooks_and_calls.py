"""Modules as others call them: parameters are used in their own module's call, and blocks can be called alone."""
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from common import GRIDS
from contract_tools import ONE_GRID, Contracts, differ, same

contracts = Contracts()


def watch_calls(model, x):
    """Parameters that are read while no module that owns them is being called, by name."""
    owners = {}
    for name, module in model.named_modules():
        for key, p in module.named_parameters(recurse=False):
            owners[id(p)] = name, key, module
    inside, outside = [], set()

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            for leaf in torch.utils._pytree.tree_leaves((args, kwargs)):
                if id(leaf) in owners and owners[id(leaf)][2] not in inside:
                    is_look = getattr(function, '__name__', '') == '__get__'  # .shape, .dtype, .device
                    if not is_look and function not in (torch.Tensor.size, torch.Tensor.dim):
                        outside.add('.'.join(owners[id(leaf)][:2]))
            return function(*args, **(kwargs or {}))

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(lambda module, args: inside.append(module)))
        handles.append(module.register_forward_hook(lambda module, args, out: inside.remove(module)))
    with Watch():
        model(x)
    for handle in handles:
        handle.remove()
    return outside


@contracts.add(grids=ONE_GRID)
def own_call(make):
    """A parameter is used during a call of its own module only, so that hooks which load or move it have run.

    `pos_embed` belongs to the model, so it may be used anywhere in the call of the model.
    """
    model, x = make(), make.images()
    outside = watch_calls(model, x)
    assert not outside, f'read outside of its own call: {sorted(outside)}'

    # As accelerate offloads: parameters have their values while their module is called, and are NaN otherwise.
    expected = model(x)
    handles = []
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        values = {name: p.detach().clone() for name, p in own.items()}
        if not values or isinstance(module, VisionTransformer):
            continue

        def load(module, args, own=own, values=values):
            for name, p in own.items():
                p.data = values[name].clone()

        def unload(module, args, out, own=own):
            for p in own.values():
                p.data = torch.full_like(p, float('nan'))

        unload(module, (), None)
        handles += [module.register_forward_pre_hook(load), module.register_forward_hook(unload)]
    same(model(x), expected, 'parameters that are there in their call alone', tol=1e-6)


@contracts.add(grids=GRIDS[:2])
def blocks_alone(make):
    """Blocks called as timm calls them work if position is in the tokens only, and else say how to call them."""
    model, x = make(), make.images()
    tokens, position = model.embed(x)
    acts = position.rotation is not None or position.bias is not None or position.layer_terms is not None
    acts |= any(
        encoding.acts_on() or encoding.scales_logits for block in model.blocks
        for encoding in block.attn.encodings.values())
    mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
    if acts:
        for wrong in (
                lambda: model.blocks(tokens), lambda: model.blocks[0](tokens), lambda: model.blocks[0](tokens, mask),
                lambda: model.blocks[0].attn(tokens)):
            with pytest.raises(ValueError, match='position=position'):
                wrong()
    else:
        same(model.norm(model.blocks(tokens)), model.forward_features(x), 'blocks as a sequence', tol=1e-6)
        expected = model.blocks[0](tokens, mask, position=position)
        same(model.blocks[0](tokens, mask), expected, 'block with a mask', tol=1e-6)
        differ(expected, model.blocks[0](tokens), 'mask')
    for wrong in (mask, position.grid):
        with pytest.raises(ValueError, match='Masks are passed as attn_mask='):
            model.blocks[0](tokens, position=wrong)
    if not any('images' in encoding.asks_for for encoding in model.encodings.values()):
        same(model.norm_pre(model._pos_embed(model.patch_embed(x))), tokens, "timm's steps", tol=1e-6)


test_contract = contracts.test()
