"""Contracts in which the trained grid matters, again for each rule for other sizes that needs it."""
import pytest

import timm_sape
from common import Maker
from test_initial_values import contracts as initial_values
from test_numerics import contracts as numerics
from test_saving_and_loading import contracts as saving_and_loading
from test_shapes_and_grids import contracts as shapes_and_grids

CONTRACTS = {**shapes_and_grids, **initial_values, **numerics, **saving_and_loading}
RULES = {name: timm_sape.get_encoding(name).rules for name in timm_sape.list_encodings()}
FACTORS = [('nope', 'log'), ('ape+sape2_k', 'log')]  # pos_enc and logit_scaling
OFTEN = [('rope2d_mixed', 'yarn'), ('alibi2d', 'slopes'), ('nope', 'log')]
NAMES = ['dynamic_img_size', 'set_input_size', 'three_ways', 'meta_device', 'half', 'config']


def cases():
    """On the first grid those of `OFTEN` run, and a fifth of the others with the usual rule. The rest with --full."""
    for pos_enc, rule in [*((name, rule) for name, rules in RULES.items() for rule in rules[1:]), *FACTORS]:
        for name in NAMES:
            for grid in CONTRACTS[name].grids[:2]:
                if grid != CONTRACTS[name].grids[0]:
                    marks = [pytest.mark.full]
                elif (pos_enc, rule) in OFTEN:
                    marks = []
                else:
                    marks = [pytest.mark.one_of(5) if rule == 'rescale' else pytest.mark.full]
                size = 'x'.join(map(str, grid))
                yield pytest.param(
                    name, pos_enc, rule, grid, id=f'{name}-{pos_enc}-{rule}-{size}', marks=marks)


def arguments(pos_enc, rule):
    return {'logit_scaling': rule} if rule == 'log' else {'pos_enc_kwargs': {pos_enc: {'resolution': rule}}}


@pytest.mark.parametrize('name, pos_enc, rule, grid', list(cases()))
def test_contract_with_rescaling(name, pos_enc, rule, grid):
    """The trained grid, which such a model has to know, is never lost."""
    make = Maker(pos_enc, grid, **arguments(pos_enc, rule))
    assert make().ref_grid_size == grid
    CONTRACTS[name](make)


@pytest.mark.parametrize('pos_enc, rules', [
    *((name, rules) for name, rules in RULES.items() if rules), ('nope', ('constant', 'log'))])
def test_each_rule_matters(pos_enc, rules):
    y = Maker(pos_enc).images(grid=(4, 7))
    given = [{'logit_scaling': rule} if 'log' in rules else arguments(pos_enc, rule) for rule in rules]
    outs = [Maker(pos_enc, **kwargs)(dynamic_img_size=True)(y) for kwargs in given]
    for i, out in enumerate(outs):
        assert all((out - other).abs().max() > 1e-4 for other in outs[:i]), rules[i]
