"""`auto_<name>`: the learned scalar before an encoding."""
import copy
import warnings

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2

import timm_sape
from common import PATCH, Maker, randomize, registered
from timm_sape.encodings.base import rotation_table

GATED = [name for name in timm_sape.list_encodings() if timm_sape.get_encoding(name).gate_init == 0.5]
NEUTRAL = [name for name in timm_sape.list_encodings() if timm_sape.get_encoding(name).gate_init == 1]
REFUSED = [name for name in timm_sape.list_encodings() if timm_sape.get_encoding(name).gate_init is None]


def build(pos_enc, randomized=True, **kwargs):
    torch.manual_seed(0)
    model = timm.create_model(
        'test_vit_pos_enc', pos_enc=pos_enc, img_size=(3 * PATCH, 5 * PATCH), patch_size=PATCH, embed_dim=32, depth=2,
        num_heads=4, num_classes=3, reg_tokens=1, global_pool='avg', fc_norm=False, **kwargs).double().eval()
    return randomize(model) if randomized else model


def images():
    return torch.randn(2, 3, 3 * PATCH, 5 * PATCH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def gates(model):
    return {name: p for name, p in model.named_parameters() if name.endswith('gate.weight')}


def own_parameters(model):
    return {name: p for name, p in model.named_parameters() if 'encodings.' in name or name == 'pos_embed'}


def zero_gradients(model, parameters):
    model.zero_grad()
    model(images()).square().sum().backward()
    return [name for name, p in parameters.items() if p.grad is None or not p.grad.abs().max() > 0]


def test_every_encoding_is_one_of_three():
    assert set(REFUSED) >= {'nope'} and set(NEUTRAL) >= {'cope'}
    assert sorted(GATED + NEUTRAL + REFUSED) == timm_sape.list_encodings()


@pytest.mark.parametrize('name', GATED)
def test_neutral_at_zero(name):
    """At 0 the model equals the one without the encoding, but learns: the gate at once, the rest a step later."""
    model = build(f'auto_{name}', randomized=False, pos_enc_kwargs={f'auto_{name}': {'init': 0}})
    plain = build('nope', randomized=False)
    difference = (model(images()) - plain(images())).abs().max()
    assert difference < 1e-12, f'{name}: off by {difference:.1e}'
    assert not zero_gradients(model, gates(model))
    optimizer = create_optimizer_v2(model, 'adamw', lr=1e-3, weight_decay=0.05)
    optimizer.step()
    assert not zero_gradients(model, own_parameters(model))


@pytest.mark.parametrize('name', NEUTRAL)
def test_neutral_at_one(name):
    """The parameters start at zero. A gate that starts at zero, too, would never learn."""
    model = build(f'auto_{name}', randomized=False)
    assert all(abs(100 * p.item() - 1) < 1e-6 for p in gates(model).values())
    assert (model(images()) - build('nope', randomized=False)(images())).abs().max() < 1e-12
    tables = {name: p for name, p in own_parameters(model).items() if name not in gates(model)}
    assert not zero_gradients(model, tables)
    create_optimizer_v2(model, 'adamw', lr=1e-3, weight_decay=0.05).step()
    assert not zero_gradients(model, own_parameters(model))
    with pytest.raises(ValueError, match='would never learn.*the default of 1'):
        build(f'auto_{name}', pos_enc_kwargs={f'auto_{name}': {'init': 0}})


@pytest.mark.parametrize('name', REFUSED)
def test_refused(name):
    with pytest.raises(ValueError, match=f"'auto_{name}': '{name}' has no neutral form"):
        build(f'auto_{name}')


@pytest.mark.parametrize('name', GATED + NEUTRAL)
def test_a_gate_of_one_changes_nothing(name):
    """With a gate of 1 it is the encoding without a gate; with 2 it is not."""
    plain = build(name)
    model = build(f'auto_{name}', pos_enc_kwargs={f'auto_{name}': {'init': 1}})
    state = {k.replace(f'encodings.{name}.', f'encodings.auto_{name}.'): v for k, v in plain.state_dict().items()}
    state.update({k: torch.full_like(p, 0.01) for k, p in gates(model).items()})
    model.load_state_dict(state)
    expected = plain(images())
    assert (model(images()) - expected).abs().max() < 1e-9
    for p in gates(model).values():
        p.data.fill_(0.02)
    assert (model(images()) - expected).abs().max() > 1e-4


@pytest.mark.parametrize('name', GATED)
def test_gates_per_instance(name):
    """One scalar per instance of the encoding. A rotation has one in each layer."""
    cls = timm_sape.get_encoding(name)
    model = build(f'auto_{name}', randomized=False)
    per_layer = cls.per_layer or cls.overrides('rotation')
    depth = cls.first_layers or 2
    assert len(gates(model)) == (depth if per_layer else 1)
    for key, p in gates(model).items():
        assert p.shape == (1,) and abs(p.item() - 0.005) < 1e-9
        assert key.startswith('blocks.' if per_layer else 'encodings.')
        assert key in model.no_weight_decay()


def test_rotation_is_gated_before_its_sine():
    """Position-SHAP's Eq. 12: the gate multiplies the angles themselves, not angles that were wrapped to a period."""
    for name in ('rope2d', 'rope2d_mixed'):
        model = build(f'auto_{name}', pos_enc_kwargs={f'auto_{name}': {'init': 0.37}})
        for block in model.blocks:
            encoding = block.attn.encodings[f'auto_{name}']
            encoding.gate.weight.data.fill_(0.0037)
            grid = timm_sape.Grid(9, 50)
            angles = encoding.angles(grid)
            assert angles.abs().max() > 7
            table = encoding(torch.zeros(1), grid=grid, hook='rotation')
            assert (table - rotation_table(0.37 * angles)).abs().max() < 1e-6


def test_effective_learning_rate():
    """The steps of the scalar w are 100 times as long as others with optimizers like Adam, 10^4 times with SGD."""
    for opt, step in (('adamw', 0.1), ('sgd', None)):
        model = build('auto_sape2_k')
        (gate, *_) = gates(model).values()
        if opt == 'sgd':
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        else:
            optimizer = create_optimizer_v2(model, opt, lr=1e-3, weight_decay=0)
        before = 100 * gate.item()
        model(images()).square().sum().backward()
        gradient_of_w = gate.grad.item() / 100
        optimizer.step()
        moved = abs(100 * gate.item() - before)
        assert abs(moved - (step or 1e4 * 1e-3 * abs(gradient_of_w))) < 1e-3 * moved


def test_initial_values():
    model = build('ape+auto_sape2_k', pos_enc_kwargs={'auto_sape2': {'init': -2, 'table_std': 0.3}}, randomized=False)
    encoding = model.blocks[1].attn.encodings['auto_sape2_k']
    assert abs(encoding.gate.weight.item() + 0.02) < 1e-9
    assert encoding.table_x.std() > 0.1
    encoding.gate.weight.data.fill_(7)
    model.init_weights()
    assert abs(encoding.gate.weight.item() + 0.02) < 1e-9


@pytest.mark.parametrize('init', ['much', None, True, [0.5]])
def test_bad_initial_values(init):
    with pytest.raises(ValueError, match="'auto_ape': init must be a finite number"):
        build('auto_ape', pos_enc_kwargs={'auto_ape': {'init': init}})


def test_names():
    assert build('sape2+auto_ape').pos_enc == 'auto_ape+sape2_k'
    assert build('auto_sape2').pos_enc == 'auto_sape2_k'
    for pos_enc, text in (
            ('ape+auto_ape', "names 'ape' more than once"),
            ('auto_rope2d+rope2d_mixed', 'two rotations, auto_rope2d and rope2d_mixed'),
            ('auto_auto_ape', "Unknown position encoding 'auto_auto_ape'"),
            ('auto_', "Unknown position encoding 'auto_'")):
        with pytest.raises(ValueError, match=text):
            build(pos_enc)
    with pytest.raises(ValueError, match="'auto_mine': the prefix 'auto_' is reserved for gated"):
        timm_sape.register_encoding('auto_mine')(timm_sape.PositionEncoding)
    assert not timm.list_models('*auto_*', module='vit_pos_enc')


def test_keywords_go_to_the_gated_name():
    with pytest.raises(ValueError, match="'sape2', which is not a part.*Write 'auto_sape2_k', or put 'sape2_k' into"):
        build('auto_sape2', pos_enc_kwargs={'sape2': {'npos': 5}})


def test_ape_is_still_timms_table():
    model = build('auto_ape', randomized=False)
    assert model.pos_embed is not None
    copy.deepcopy(model).set_input_size(img_size=(4 * PATCH, 4 * PATCH))
    gate = model.encodings['auto_ape'].gate
    gate.weight.data.zero_()
    assert (model(images()) - build('nope', randomized=False)(images())).abs().max() < 1e-12


def test_rotation_of_a_third_party():
    """It must define its angles, or it cannot be gated."""
    class Turn(timm_sape.PositionEncoding):
        def rotation(self, grid):
            return rotation_table(torch.zeros(grid.num_patches, self.head_dim // 2))

    with registered(turn=Turn):
        build('turn')
        with pytest.raises(ValueError, match='Derive Turn from RotaryEncoding'):
            build('auto_turn')


@pytest.mark.parametrize('init', [0, 0.3, 1])
def test_mixer_of_a_third_party(init):
    """At 0 tokens and terms stay as they are."""
    class Mixer(timm_sape.PositionEncoding):
        per_layer = False

        def mix(self, x, term, grid):
            return 3 * x, 5 * term

    with registered(mixer=Mixer):
        encoding = timm_sape.create_encoding('auto_mixer', dim=32, num_heads=4, grid_size=(2, 3), init=init)
    x, term = torch.randn(2, 1, 6, 32)
    found = encoding(x, term, grid=timm_sape.Grid(2, 3), hook='mix')
    torch.testing.assert_close(found, ((1 + 2 * init) * x, (1 + 4 * init) * term))


def adapted(model):
    """As under LoRA: all parameters of the model are frozen, and those of the adapters that it gets are not."""
    model.requires_grad_(False)
    for block in model.blocks:
        block.attn.proj.adapter = torch.nn.Linear(model.embed_dim, 2)
    return model


def warnings_of_training(module, mode=True):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        module.train(mode)
    return [str(warning.message) for warning in seen]


def graft(pos_enc='sape2_k+rope2d', **kwargs):
    return timm_sape.graft('test_vit', pos_enc, img_size=32, num_classes=3, **kwargs)


@pytest.mark.parametrize('wrap', [lambda model: model, torch.nn.Sequential], ids=['itself', 'wrapped'])
def test_frozen_gates_of_a_graft_are_warned_about(wrap):
    (message,) = warnings_of_training(wrap(adapted(graft())))
    assert message.startswith('The gates of auto_rope2d, auto_sape2_k are 0 and frozen')
    assert "modules_to_save=['auto_rope2d', 'auto_sape2_k']" in message


def test_a_frozen_gate_of_any_layer_is_warned_about():
    """Also if the part of it on this rank of FSDP is empty elsewhere."""
    model = graft('rope2d')
    first, *others = [gate for name, gate in gates(model).items()]
    first.requires_grad_(False)
    (message,) = warnings_of_training(model)
    assert message.startswith('The gates of auto_rope2d are 0 and frozen')
    first.data = first.data[:0]
    assert others and warnings_of_training(model) == []


def test_open_gates_are_not_warned_about():
    assert warnings_of_training(graft()) == []
    assert warnings_of_training(adapted(graft()), mode=False) == []
    assert warnings_of_training(graft().requires_grad_(False)) == []  # nothing at all will be trained

    trainable, learned = adapted(graft()), adapted(graft())
    for gate in gates(trainable).values():
        gate.requires_grad_()
    for gate in gates(learned).values():
        gate.data.fill_(0.01)
    assert warnings_of_training(trainable) == warnings_of_training(learned) == []
    assert warnings_of_training(adapted(graft('cope'))) == []  # its gate is 1 from the start


def test_contracts_see_gates():
    assert any('auto_' in part for part in Maker('ape+auto_rope2d+auto_sape2_k')().pos_enc.split('+'))
