"""Parameter groups: weight decay and layer-wise learning rates."""
from timm.models import group_parameters
from timm.optim import param_groups_layer_decay, param_groups_weight_decay

from contract_tools import ONE_GRID, Contracts

contracts = Contracts()


@contracts.add(grids=ONE_GRID)
def no_weight_decay(make):
    """No parameter of an encoding has weight decay, whatever its shape, and every name in the list exists."""
    model = make()
    names = model.no_weight_decay()
    parameters = dict(model.named_parameters())
    assert names - {'dist_token'} <= {*parameters, 'pos_embed'}, 'names of parameters that are not there'
    assert {'cls_token', 'reg_token', 'pos_embed'} <= names
    groups = param_groups_weight_decay(model, 0.05, no_weight_decay_list=names)
    decayed = {id(p) for group in groups if group['weight_decay'] for p in group['params']}
    for name, p in parameters.items():
        assert ('encodings.' in name) <= (id(p) not in decayed), f'{name} has weight decay'
    assert id(model.blocks[0].attn.qkv.weight) in decayed


@contracts.add(grids=ONE_GRID)
def group_matcher(make):
    """Layer-wise rates: encodings of a layer are in the group of that layer, shared ones in that of the stem."""
    model = make(depth=3)
    groups = param_groups_layer_decay(model, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.5)
    scale = {id(p): group['lr_scale'] for group in groups for p in group['params']}
    parameters = dict(model.named_parameters())
    scale = {name: scale[id(p)] for name, p in parameters.items()}
    assert scale['head.weight'] == 1
    for name in parameters:
        if name.startswith('blocks.'):
            assert scale[name] == scale[f'blocks.{name.split(".")[1]}.attn.qkv.weight'], f'group of {name}'
        elif 'encodings.' in name or name == 'pos_embed':
            assert scale[name] == scale['cls_token'] == min(scale.values()), f'group of {name}'
    assert len({scale[f'blocks.{i}.attn.qkv.weight'] for i in range(3)}) == 3
    coarse = {name for name in parameters if group_parameters(
        model, model.group_matcher(coarse=True), reverse=True)[name] == 0}
    assert {name for name in parameters if name.startswith('encodings.')} <= coarse


@contracts.add(grids=ONE_GRID)
def head_is_last(make):
    """timm exempts the last two parameters from adaptive clipping: those of the head, not of an encoding."""
    model = make()
    last = [name for name, _ in model.named_parameters()][-2:]
    assert last == ['head.weight', 'head.bias'], f'last two parameters are {last}'
    model.reset_classifier(7)
    last = [name for name, _ in model.named_parameters()][-2:]
    assert last == ['head.weight', 'head.bias'], f'after reset_classifier the last two parameters are {last}'


test_contract = contracts.test()
