"""What is true of the contracts of all subjects: each has a negative control, and their models are fit to test."""
from importlib import import_module
from pathlib import Path

import pytest

from common import PATCH, POS_ENCS, Maker
from contract_tools import same


def test_every_contract_has_a_control():
    modules = [vars(import_module(path.stem)) for path in Path(__file__).parent.glob('test_*.py')]
    contracts = {name for module in modules for name in module.get('contracts', ())}
    assert contracts and contracts == {control.contract for module in modules for control in module.get('controls', ())}


@pytest.mark.parametrize('pos_enc', POS_ENCS)
def test_encodings_are_random(pos_enc):
    """The contracts look at models in which position matters: moving the patches changes the prefix tokens."""
    make = Maker(pos_enc)
    model, x = make(), make.images()
    moved, still = (
        model.forward_features(y)[:, :5] for y in (x.unflatten(3, (5, PATCH)).roll(2, 3).flatten(3), x))
    if pos_enc == 'nope':
        same(moved, still, 'nope')
    else:
        change = (moved - still).abs().max()
        assert change > 1e-2, 'Its bias is too small to test: set stronger keywords in KEYWORDS of tests/common.py.'
