"""Class and register tokens: with or without them patches come out the same, and position leaves them alone."""
import itertools

import torch

from contract_tools import Contracts, check_layers, gradients, same

contracts = Contracts()


def patches_without_prefix(make, **prefix):
    """If patches cannot see the prefix tokens, they come out as in a model without any."""
    x = make.images()
    kwargs = dict(global_pool='avg', fc_norm=False)
    bare = make(class_token=False, reg_tokens=0, **kwargs)
    model = make(**prefix, **kwargs)
    p = model.num_prefix_tokens
    if model.pos_embed is not None:
        bare.pos_embed.data.copy_(model.pos_embed[:, model.pos_embed.shape[1] - bare.pos_embed.shape[1]:])
    for name, encoding in model.encodings.items():
        if name == 'lape':
            bare.encodings[name].table.data.copy_(encoding.table[:, p:])
    mask = torch.ones(p + make.grid[0] * make.grid[1], p + make.grid[0] * make.grid[1], dtype=torch.bool)
    mask[p:, :p] = False
    same(model.forward_features(x, attn_mask=mask)[:, p:], bare.forward_features(x), 'patches without prefix')
    assert model(x).shape == (2, 3)
    gradients(model, model(x).sum())
    check_layers(model, x)


@contracts.add
def class_token(make):
    for kwargs in (dict(class_token=False), dict(class_token=True), dict(class_token=True, no_embed_class=True)):
        patches_without_prefix(make, reg_tokens=0, **kwargs)


@contracts.add
def register_tokens(make):
    for has_class_token, no_embed_class in itertools.product((False, True), repeat=2):
        patches_without_prefix(make, reg_tokens=4, class_token=has_class_token, no_embed_class=no_embed_class)


@contracts.add
def prefix_rule(make):
    """Prefix tokens are not rotated, and logits in their rows and columns have no bias."""
    check_layers(make(), make.images())


test_contract = contracts.test()
