"""Slips in an encoding of one's own: each is an error that names the encoding, and none is a wrong result."""
import sys

import pytest
import timm
import torch
import torch.nn as nn
from PIL import Image

import timm_sape
from timm_sape import FixedEncoding, OffsetBiasEncoding, PositionEncoding
from timm_sape.cli import main
from timm_sape.encodings.base import FixedRotaryEncoding, FrequencyEncoding, RotaryEncoding, rotation_table

N, D, HEADS, LAYERS = 7, 64, 4, 2  # a grid of 2 x 3 patches and a class token

pytestmark = pytest.mark.usefixtures('own_registry')


def register(hook, function, base=PositionEncoding, **attributes):
    return timm_sape.register_encoding('mine')(type('Mine', (base,), {hook: function, **attributes}))


def build(pos_enc='mine', **kwargs):
    kwargs = {'img_size': (16, 24), 'patch_size': 8, 'embed_dim': D, 'num_heads': HEADS, 'depth': LAYERS, **kwargs}
    return timm.create_model('test_vit_pos_enc', pos_enc=pos_enc, **kwargs).eval()


class OfOneGrid(PositionEncoding):
    """A table of the size of the model's own grid, which nothing resizes."""
    per_layer = False

    def __init__(self, **host):
        super().__init__(**host)
        self.table = nn.Parameter(torch.zeros(1 + self.grid_size[0] * self.grid_size[1], self.dim))

    def embed(self, x, grid):
        return self.table


def test_a_table_that_nothing_resizes():
    timm_sape.register_encoding('mine')(OfOneGrid)
    model = build(dynamic_img_size=True)
    model(torch.zeros(1, 3, 16, 24))
    with pytest.raises(ValueError, match=r"embed returned \[7, 64\].* size of the model's own grid.* ResizedEncoding"):
        model(torch.zeros(1, 3, 24, 24))


def test_wrong_shapes_that_only_look_like_the_own_grid():
    """Its H*W is the width of the model here, and the axis of D is right."""
    register('embed', lambda self, x, grid: x[:, 1:], per_layer=False)
    model = build(img_size=64, dynamic_img_size=True)
    with pytest.raises(ValueError, match=r'embed returned \[1, 100, 64\].*pad_tokens'):
        model(torch.zeros(1, 3, 80, 80))


def test_wrong_shapes_in_an_export():
    register('embed', lambda self, x, grid: x[:, 1:], per_layer=False)
    model, batch = build(dynamic_img_size=True), torch.export.Dim('batch', min=2, max=8)
    with pytest.raises(ValueError, match='embed returned .*pad_tokens'):
        torch.export.export(
            model, (torch.zeros(2, 3, 24, 24),), dynamic_shapes={'x': {0: batch}}, strict=False)


RESULTS = [
    ('embed', lambda self, x, grid: x[:, 1:], r'embed returned \[2, 6, 64\], .*\[B, N, D\] = \[2, 7, 64\].*pad_tokens'),
    ('embed', lambda self, x, grid: x[None], r'embed returned \[1, 2, 7, 64\]'),
    ('embed', lambda self, x, grid: x.new_zeros(3, 1, D), r'embed returned \[3, 1, 64\]'),
    ('embed', lambda self, x, grid: None, 'embed returned None. Is a `return` missing'),
    ('layer_embed', lambda self, grid: torch.zeros(N, D), r'layer_embed returned \[7, 64\], .*\[L, N, D\] = \[L, 7'),
    ('layer_embed', lambda self, grid: torch.zeros(LAYERS, 6, D), r'layer_embed returned \[2, 6, 64\].*\[L, 7, 64\]'),
    ('layer_embed', lambda self, grid: None, 'layer_embed returned None'),
    ('mix', lambda self, x, term, grid: x + term, r'mix returned torch.float32 \[2, 7, 64\]. It must return two'),
    ('turn', lambda self, q, k, grid: q, r'turn returned torch.float32 .*It must return two tensors'),
    ('turn', lambda self, q, k, grid: (q.double(), k), r'turn returned torch.float64. It must have the dtype of q'),
    ('turn', lambda self, q, k, grid: (q.mT, k.mT), r'turn returned \[2, 4, 16, 7\], which is not \[B, h, N, C\]'),
    ('turn', lambda self, q, k, grid: (q[..., 1:], k[..., 1:]), r'turn returned \[2, 4, 7, 15\], .*7, 16\].* or more'),
    ('turn', lambda self, q, k, grid: (q.repeat(1, 1, 1, 2), k), r'turn returned \[2, 4, 7, 16\].*7, 32\].* same'),
    ('turn', lambda self, q, k, grid: (q.sum(), k), r'turn returned \[\], which is not'),
    ('rotation', lambda self, grid: None, 'rotation returned None'),
    ('rotation', lambda self, grid: (torch.zeros(6, 32),) * 2, 'rotation returned a tuple of 2'),
    ('rotation', lambda self, grid: torch.zeros(N, 32), r'rotation returned \[7, 32\].*\[B, h, N-P, 2\*d\]'),
    ('rotation', lambda self, grid: torch.zeros(6, 16), r'rotation returned \[6, 16\]'),
    ('position_bias', lambda self, grid: torch.eye(N) > 0, r'position_bias returned torch.bool \[7, 7\]. It must be a'),
    ('position_bias', lambda self, grid: torch.eye(N).long(), 'position_bias returned torch.int64'),
    ('position_bias', lambda self, grid: torch.eye(N) * 1j, 'position_bias returned torch.complex64'),
    ('position_bias', lambda self, grid: torch.eye(N, device='meta'), 'position_bias returned a tensor on the meta'),
    ('position_bias', lambda self, grid: 1., 'position_bias returned float 1.0'),
    ('position_bias', lambda self, grid: torch.zeros(3, 1, N, N), r'position_bias returned \[3, 1, 7, 7\]'),
    ('position_bias', lambda self, grid: torch.zeros(1, 1, 1, N, N), r'position_bias returned \[1, 1, 1, 7, 7\]'),
    ('content_bias', lambda self, q, k, grid: q.new_zeros(3, HEADS, N, N), r'content_bias returned \[3, 4, 7, 7\]'),
    ('content_bias', lambda self, q, k, grid: (q @ k.mT)[..., 1:, 1:], r'content_bias returned \[2, 4, 6, 6\].*betw'),
    ('channels', lambda self, q, k, x, grid, scale: (q, k[..., :2]), r'channels returned \[2, 4, 7, 2\], which is not'),
    ('channels', lambda self, q, k, x, grid, scale: (q[0], k[0]), r'channels returned \[4, 7, 16\]'),
    ('channels', lambda self, q, k, x, grid, scale: q, 'channels returned .*two tensors'),
    (
        'channels', lambda self, q, k, x, grid, scale: (q.double(), k.double()),
        'channels returned torch.float64. It must have the dtype of q'),
    ('values', lambda self, attn, grid: attn.new_zeros(2, N, HEADS, 16), r'values returned \[2, 7, 4, 16\]'),
    ('values', lambda self, attn, grid: attn.new_zeros(3, 1, 1, 16), r'values returned \[3, 1, 1, 16\]'),
]


@pytest.mark.parametrize('hook, function, message', RESULTS, ids=[f'{i}-{row[0]}' for i, row in enumerate(RESULTS)])
def test_results_of_hooks(hook, function, message):
    register(hook, function, per_layer=hook not in ('layer_embed', 'mix'))
    model = build('ape+mine')
    with pytest.raises(ValueError, match=f"'mine': {message}"):
        model(torch.randn(2, 3, 16, 24))


@pytest.mark.parametrize('hook, function', [
    ('embed', lambda self, x, grid: x.new_ones(())),
    ('embed', lambda self, x, grid: x.double()),
    ('layer_embed', lambda self, grid: torch.ones(LAYERS, N, D)),
    ('layer_embed', lambda self, grid: torch.arange(8.).view(8, 1, 1).expand(8, 1, D)),
    ('layer_embed', lambda self, grid: torch.ones(LAYERS, 1, N, D)),
    ('mix', lambda self, x, term, grid: [2 * x, term]),
    ('turn', lambda self, q, k, grid: [2 * q, k]),
    ('turn', lambda self, q, k, grid: (q.repeat(1, 1, 1, 2), k.repeat(1, 1, 1, 2))),
    ('rotation', lambda self, grid: torch.ones(HEADS, 6, 32)),
    ('rotation', lambda self, grid: torch.ones(1, 1, 6, 32)),
    ('position_bias', lambda self, grid: torch.arange(7.)),
    ('position_bias', lambda self, grid: torch.arange(7.).expand(1, 1, 1, 7).to(torch.bfloat16)),
    ('content_bias', lambda self, q, k, grid: (q @ k.mT)[:, :1]),
    ('channels', lambda self, q, k, x, grid, scale: (q[..., :3], k[..., :3])),
    ('values', lambda self, attn, grid: attn.new_ones(16)),
])
def test_what_fits_acts(hook, function):
    register(hook, function, per_layer=hook not in ('layer_embed', 'mix'))
    torch.manual_seed(0)
    model = build('ape+mine')
    plain = build('ape')
    plain.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 16, 24)
    assert not torch.allclose(model(x), plain(x))


def test_more_channels_and_a_rotation():
    """The table is for d channels."""
    def wider(self, q, k, grid):
        return q.repeat(1, 1, 1, 2), k.repeat(1, 1, 1, 2)

    register('turn', wider, rotation=lambda self, grid: torch.ones(6, 32))
    with pytest.raises(ValueError, match=r'turn returned \[2, 4, 7, 32\], .*\[2, 4, 7, 16\].* has a rotation, too'):
        build('mine')(torch.randn(2, 3, 16, 24))


def test_a_bias_by_offset():
    """`compute` gives the bias of each offset, and the base class that of each pair of patches."""
    class ByOffset(OffsetBiasEncoding):
        def __init__(self, **host):
            super().__init__(**host)
            self.make_table()

        def compute(self, grid, device, dtype):
            dy, dx = self.offsets(grid, device, dtype)
            return (10 * dy + dx).repeat(self.num_heads, 1, 1)

    timm_sape.register_encoding('mine')(ByOffset)
    encoding = build().encodings['mine']
    for size in ((2, 3), (4, 2)):
        grid = timm_sape.Grid(*size, 1)
        bias = encoding(torch.zeros(1), grid=grid, hook='position_bias')
        places = [(y, x) for y in range(size[0]) for x in range(size[1])]
        expected = [[10 * (key[0] - query[0]) + key[1] - query[1] for key in places] for query in places]
        assert bias[:, 1:, 1:].tolist() == HEADS * [expected]
        assert not bias[:, 0].any() and not bias[:, :, 0].any()


class Slope(PositionEncoding):
    """Attention falls with distance."""

    def __init__(self, *, start=0.1, device=None, dtype=None, **host):
        super().__init__(device=device, dtype=dtype, **host)
        self.start = start
        self.slope = nn.Parameter(torch.empty(self.num_heads, 1, 1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.constant_(self.slope, self.start)

    def position_bias(self, grid):
        yx = grid.coordinates(self.slope.device, torch.float32)
        return grid.between_tokens(-self.slope * torch.cdist(yx, yx))


def test_a_gate_of_0_on_zeros():
    """Neither would get a gradient. With gate_init = 1, or other values, both learn."""
    cls = timm_sape.register_encoding('mine')(Slope)
    for pos_enc_kwargs in ({'mine': {'start': 0}}, {'mine': {'start': 0, 'init': 0}}):
        with pytest.raises(ValueError, match='that starts at 0 would never learn. Set gate_init = 1 in Slope'):
            timm_sape.graft('test_vit', 'mine', pos_enc_kwargs=pos_enc_kwargs)
    for start, gate_init in ((0, 1), (0.1, 0.5)):
        timm_sape.register_encoding('mine')(type('Slope', (Slope,), {
            'gate_init': gate_init, '__module__': Slope.__module__, '__qualname__': cls.__qualname__}))
        model = timm_sape.graft('test_vit', 'mine', pos_enc_kwargs={'mine': {'start': start}})
        model(torch.randn(2, 3, 160, 160)).sum().backward()
        own = [p for name, p in model.named_parameters() if 'mine' in name and '.5.' not in name]
        assert any(p.grad.abs().max() > 0 for p in own)


def test_a_gate_of_0_on_what_returns_nothing():
    timm_sape.register_encoding('mine')(type('Forgets', (Slope,), {'position_bias': lambda self, grid: None}))
    with pytest.raises(ValueError, match='position_bias returned None. Is a `return` missing'):
        build('auto_mine', pos_enc_kwargs={'auto_mine': {'start': 0, 'init': 0}})


@pytest.mark.parametrize('finish', [
    lambda distances, heads: distances.long().clamp(max=1), lambda distances, heads: distances.expand(heads, -1, -1)],
    ids=['indices', 'expanded'])
def test_tables_of_any_kind(finish):
    """Indices, and a table that repeats itself in memory, on every grid and after each way to compute them again."""
    class Kind(FixedEncoding):
        def __init__(self, **host):
            super().__init__(**host)
            self.make_table()

        def compute(self, grid, device, dtype):
            yx = grid.coordinates(device, dtype)
            return finish(torch.cdist(yx, yx), self.num_heads)

        def position_bias(self, grid):
            return grid.between_tokens(-self.table_for(grid).float())

    timm_sape.register_encoding('mine')(Kind)
    model = build('ape+mine', dynamic_img_size=True)
    x, larger = torch.randn(2, 3, 16, 24), torch.randn(2, 3, 32, 24)
    before, before_larger = model(x), model(larger)
    assert torch.equal(model.half().float().encodings['mine'].table, build('ape+mine').encodings['mine'].table)
    model = build('ape+mine', dynamic_img_size=True)
    model.encodings['mine'].init_non_persistent_buffers()
    model.encodings['mine'].reset_parameters()
    for size in ((32, 24), (16, 24)):
        model.set_input_size(size)
    fresh = build('ape+mine', dynamic_img_size=True)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(model(x), fresh(x)) and torch.equal(model(larger), fresh(larger))
    assert before.isfinite().all() and before_larger.isfinite().all()


def test_a_table_that_is_not_returned():
    def init(self, **host):
        FixedEncoding.__init__(self, **host)
        self.make_table()

    register(
        '__init__', init, FixedEncoding, compute=lambda self, grid, device, dtype: None,
        position_bias=lambda self, grid: self.table_for(grid))
    with pytest.raises(ValueError, match='compute returned NoneType, not a tensor. Is a `return` missing'):
        build()


def test_a_gate_of_0_on_what_acts_without_parameters():
    def content_bias(self, q, k, grid):
        places = grid.coordinates(q.device, q.dtype).sum(-1)  # [H*W], of the keys
        return grid.between_tokens(self.slope + places.expand(grid.num_patches, -1))

    timm_sape.register_encoding('mine')(type('Acts', (Slope,), {
        'content_bias': content_bias, 'position_bias': PositionEncoding.position_bias}))
    assert build('auto_mine', pos_enc_kwargs={'auto_mine': {'start': 0, 'init': 0}}) is not None


def test_forward_in_place_of_a_hook():
    with pytest.raises(ValueError, match='overrides no hook, so it would do nothing. The hooks are embed'):
        register('forward', lambda self, x: x)
    with pytest.raises(ValueError, match=r'cannot call Mine.forward .* leave it out, or write def forward'):
        register('forward', lambda self, x: x, position_bias=lambda self, grid: torch.zeros(()))
    register('forward', lambda self, x, *, hook, grid: x.new_ones(()), position_bias=lambda self, grid: None)
    assert build()(torch.zeros(1, 3, 16, 24)).shape == (1, 1000)


def test_a_factor_alone():
    def init(self, **host):
        PositionEncoding.__init__(self, **host)

    register('__init__', init, logit_factor=lambda self, grid: 2.)
    assert not torch.equal(*(build(name)(torch.ones(1, 3, 16, 24).cumsum(3)) for name in ('mine', 'nope')))


def test_terms_of_layers_that_were_taken_away():
    register('layer_embed', lambda self, grid: torch.ones(LAYERS, N, D), per_layer=False)
    model = build()
    model.prune_intermediate_layers([0])
    assert len(model.blocks) == 1 and model.forward_features(torch.zeros(1, 3, 16, 24)).shape == (1, N, D)


def test_angles_without_a_base_that_rotates():
    with pytest.raises(ValueError, match='For a rotation derive it from RotaryEncoding, too'):
        register('angles', lambda self, grid: torch.zeros(6, 8), base=FrequencyEncoding)


def test_a_gate_of_its_own():
    def init(self, **host):
        PositionEncoding.__init__(self, **host)
        self.gate = nn.Sigmoid()

    register('__init__', init, content_bias=lambda self, q, k, grid: self.gate(q @ k.mT))
    for pos_enc in ('mine', 'auto_mine'):
        with pytest.raises(ValueError, match='Mine sets self.gate, .* Choose another name'):
            build(pos_enc)


def test_a_keyword_of_the_gate():
    def init(self, *, init=7., **host):
        PositionEncoding.__init__(self, **host)

    with pytest.raises(ValueError, match="the keyword 'init' is the initial value of the gate of 'auto_mine'"):
        register('__init__', init, position_bias=lambda self, grid: torch.zeros(()))


@pytest.mark.parametrize('make', [
    lambda: torch.empty(3), lambda: torch.empty_like(torch.zeros(3)), lambda: torch.zeros(3).new_empty(3),
    lambda: torch.Tensor(3)])
@pytest.mark.parametrize('sets', [False, True])
def test_memory_as_a_parameter(make, sets):
    def init(self, **host):
        PositionEncoding.__init__(self, **host)
        self.w = nn.Parameter(make())
        self.register_buffer('like', torch.ones(2).to(torch.empty(0)))
        if sets:
            self.start()

    register('__init__', init, position_bias=lambda self, grid: self.w.sum(), start=lambda self: nn.init.ones_(self.w))
    if sets:
        build()
    else:
        with pytest.raises(ValueError, match='of Mine does not set w, .* end the constructor by self.reset_parameters'):
            build()


def test_a_helper_with_a_name_much_like_a_hook():
    register('position_bias', lambda self, grid: torch.zeros(()), channel=lambda self: 3)


def _turn(self, q, k, grid):
    return q * self.gated(self.w).exp() if self.applies else q * self.w.exp(), k


def _channels(self, q, k, x, grid, scale):
    w = self.gated(self.w) if self.applies else self.w
    row = grid.pad_tokens(torch.ones(*q.shape[:2], q.shape[2] - grid.num_prefix_tokens, 1))
    return row * w, row


def _attend(self, q, k, v, rotated_q, rotated_k, mask, grid, scale, dropout_p, drop, fused):
    bias = self.content_bias(q, k, grid)
    return drop((scale * rotated_q @ rotated_k.mT + (self.gated(bias) if self.applies else bias)).softmax(dim=-1)) @ v


def _rotation_of_grid(self, grid):
    angles = self.angles(grid) * self.w.exp()
    return rotation_table(self.gated(angles) if self.applies else angles)


OF_GATES = {  # a hook that must apply the gate itself: what is overridden
    'turn': dict(turn=_turn),
    'channels': dict(channels=_channels),
    'attend': dict(attend=_attend, content_bias=lambda self, q, k, grid: q @ k.mT * self.w),
    'rotation': dict(rotation_of_grid=_rotation_of_grid, base=RotaryEncoding, angles=lambda self, grid: (
        grid.coordinates(dtype=torch.float32)[:, :1].expand(-1, self.head_dim // 2))),
}


@pytest.mark.parametrize('hook', OF_GATES)
@pytest.mark.parametrize('applies', [True, False])
def test_a_gate_that_a_hook_forgets(hook, applies):
    """A graft would not be neutral, and its gate would never learn."""
    members = dict(OF_GATES[hook])
    base = members.pop('base', PositionEncoding)

    def init(self, **host):
        base.__init__(self, **host)
        self.w = nn.Parameter(torch.ones(1))

    register('__init__', init, base, applies=applies, **members)
    if not applies:
        with pytest.raises(ValueError, match=f'{hook} of Mine acts although its gate is 0. .* self.gated'):
            build('auto_mine', pos_enc_kwargs={'auto_mine': {'init': 0}})
        return
    mine, plain = build('auto_mine', pos_enc_kwargs={'auto_mine': {'init': 0}}), build('nope')
    plain.load_state_dict({k: v for k, v in mine.state_dict().items() if 'encodings' not in k})
    x = torch.randn(1, 3, 16, 24)
    torch.testing.assert_close(mine(x), plain(x))
    mine(x).square().sum().backward()
    assert mine.blocks[0].attn.encodings['auto_mine'].gate.weight.grad.any()


def test_parameters_that_nothing_sets_again():
    def init(self, *, device=None, **host):
        PositionEncoding.__init__(self, device=device, **host)
        self.w = nn.Parameter(torch.ones(1, device=device))

    register('__init__', init, position_bias=lambda self, grid: self.w)
    state_dict = build().state_dict()
    model = build(device='meta')
    model.load_state_dict(state_dict, assign=True)
    with pytest.raises(ValueError, match='Set the parameters of Mine in reset_parameters'):
        build(device='meta').to_empty(device='cpu').init_weights()


@pytest.mark.parametrize('base', [PositionEncoding, FixedEncoding])
def test_layers_that_nothing_sets_again(base):
    """Else timm's rule for linear layers would set them, which is another than that of the constructor."""
    def init(self, *, device=None, dtype=None, **host):
        base.__init__(self, device=device, dtype=dtype, **host)
        self.layer = nn.Linear(2, self.dim, device=device, dtype=dtype)
        if base is FixedEncoding:
            self.make_table()

    register(
        '__init__', init, base, embed=lambda self, x, grid: grid.pad_tokens(self.layer(grid.coordinates(x.device))),
        compute=lambda self, grid, device, dtype: grid.coordinates(device, dtype))
    for pos_enc in ('mine', 'auto_mine'):
        with pytest.raises(ValueError, match='nothing gives layer.weight its initial values again'):
            build(pos_enc).init_weights()


@pytest.mark.parametrize('hidden', [
    lambda: torch.ones(1, requires_grad=True),
    lambda: [nn.Parameter(torch.ones(1))],
    lambda: {'a': nn.Linear(2, 2)},
    lambda: [nn.Linear(2, 2)],
])
def test_parameters_that_torch_does_not_see(hidden):
    def init(self, *, seen=False, device=None, **host):
        PositionEncoding.__init__(self, device=device, **host)
        self.rnn = nn.GRU(2, 2)  # which lists its own parameters in an attribute
        self.linear = nn.utils.weight_norm(nn.Linear(2, 2))  # whose weight is computed from parameters
        self.seen = nn.Parameter(torch.ones(1))
        self.found = [self.seen, self.rnn, nn.GELU(), nn.Linear(2, 2).requires_grad_(False)] if seen else hidden()

    register('__init__', init, reset_parameters=lambda self: None, position_bias=lambda self, grid: self.seen[:, None])
    with pytest.raises(ValueError, match='found of Mine would neither be trained nor saved'):
        build()
    build(pos_enc_kwargs={'mine': {'seen': True}})


def test_tokens_in_place_of_a_term():
    register('embed', lambda self, x, grid: x.add_(1))
    with pytest.raises(ValueError, match='embed returned the tokens that it got. It must return only the term'):
        build()(torch.randn(1, 3, 16, 24))


@pytest.mark.parametrize('base', [PositionEncoding, FixedEncoding])
def test_buffers_that_nothing_computes_again(base):
    def init(self, *, persistent=False, device=None, **host):
        base.__init__(self, device=device, **host)
        if base is FixedEncoding:
            self.make_table()
        self.register_buffer('slope', torch.full((), 0.1, device=device), persistent=persistent)

    functions = dict(
        position_bias=lambda self, grid: self.slope * torch.eye(grid.num_tokens),
        compute=lambda self, grid, device, dtype: grid.coordinates(device, dtype))
    register('__init__', init, base, **functions)
    with pytest.raises(ValueError, match='slope of Mine is not saved.* in a method init_non_persistent_buffers'):
        build()
    build(pos_enc_kwargs={'mine': {'persistent': True}})

    def again(self):
        base.init_non_persistent_buffers(self)
        self.slope.fill_(0.1)

    def reset_parameters(self):
        self.init_non_persistent_buffers()

    register('__init__', init, base, init_non_persistent_buffers=again, reset_parameters=reset_parameters, **functions)
    expected, x = build(), torch.randn(1, 3, 16, 24)
    model = build(device='meta').to_empty(device='cpu')
    model.init_weights()
    model.load_state_dict(expected.state_dict())
    torch.testing.assert_close(model(x), expected(x))


@pytest.mark.parametrize('asked, per_layer, hook', [
    (('images',), True, 'embed'), (('image',), False, 'embed'), (('images'), False, 'embed'), (None, False, 'embed'),
    (('images',), False, 'position_bias')])
def test_what_the_model_does_not_have(asked, per_layer, hook):
    with pytest.raises(ValueError, match="a tuple of some of 'pos_embed', 'images', .*, for an 'embed' with per_layer"):
        register(hook, lambda self, x, grid, **given: x, asks_for=asked, per_layer=per_layer)


def test_a_parameter_in_a_table():
    def init(self, **host):
        FixedEncoding.__init__(self, **host)
        self.w = nn.Parameter(torch.ones(1))
        self.make_table()

    register(
        '__init__', init, FixedEncoding, compute=lambda self, grid, device, dtype: self.w * torch.eye(6),
        position_bias=lambda self, grid: grid.pad_prefix(self.table_for(grid)))
    with pytest.raises(ValueError, match='its table would not follow a parameter. Derive it from PositionEncoding'):
        build()


def test_a_term_of_each_image_where_patches_are_dropped():
    """`pad_tokens` and `keep_tokens`, which the messages recommend, take a table of each image, too."""
    def embed(self, x, grid):
        seen = grid.scatter(x[:, None, grid.num_prefix_tokens:])[:, 0]  # [B, H*W, D]
        return grid.keep_tokens(grid.pad_tokens(seen.cumsum(1).sin()))

    register('embed', embed)
    model = build().eval()
    x, keep = torch.randn(3, 3, 16, 24), torch.tensor([[5, 0, 2], [1, 2, 3], [4, 3, 0]])
    together = model.forward_features(x, keep_indices=keep)
    for i in range(3):
        alone = model.forward_features(x[i:i + 1], keep_indices=keep[i:i + 1])
        torch.testing.assert_close(together[i:i + 1], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('fixed', [False, True])
def test_positions_under_autocast(fixed):
    """A product of coordinates and frequencies in bfloat16 would give many patches the same position."""
    def angles(self, grid, *_):
        return grid.coordinates(dtype=torch.float32) @ torch.ones(2, self.head_dim // 2).mul(.01)

    def init(self, **host):
        FixedRotaryEncoding.__init__(self, **host)
        self.make_table()

    if fixed:
        register('compute_angles', angles, FixedRotaryEncoding, __init__=init)
    else:
        register('angles', angles, RotaryEncoding)
    encoding = timm_sape.create_encoding('mine', dim=D, num_heads=HEADS, grid_size=(2, 3))
    given = dict(grid=timm_sape.Grid(40, 40, 1), hook='rotation')
    x = torch.zeros(1, 1601, D)
    with torch.autocast('cpu', torch.bfloat16):
        found = encoding(x, **given)
    assert torch.equal(found, encoding(x, **given)) and found.dtype == torch.float32


def test_tables_under_autocast():
    """The same for the table of a fixed encoding: of another grid, of a model that is built or resized there."""
    def init(self, **host):
        FixedEncoding.__init__(self, **host)
        self.make_table()

    def compute(self, grid, device, dtype):
        return grid.coordinates(device, dtype) @ torch.full((2, D), .01, device=device, dtype=dtype)

    register('embed', lambda self, x, grid: x + grid.pad_tokens(self.table_for(grid)), FixedEncoding,
             __init__=init, compute=compute)

    def embedded(autocast):
        with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
            encoding = timm_sape.create_encoding('mine', dim=D, num_heads=HEADS, grid_size=(2, 400))
            grids = [timm_sape.Grid(*size, 1) for size in ((2, 400), (400, 2))]
            found = [encoding(torch.zeros(1, 801, D), grid=grid, hook='embed') for grid in grids]
            encoding.set_grid_size((400, 2))
        return *found, encoding.table

    for found, expected in zip(embedded(True), embedded(False)):
        assert torch.equal(found, expected) and found.unique().numel() > 400


def test_commands_say_where_an_own_encoding_fails(tmp_path, capsys, monkeypatch):
    file = tmp_path / 'failing_encoding.py'
    file.write_text('\n'.join([
        'import timm_sape', '', '', "@timm_sape.register_encoding('failing')",
        'class Failing(timm_sape.PositionEncoding):', '    def position_bias(self, grid):',
        '        a, b, c = grid.size']))
    Image.new('RGB', (160, 160), 'red').save(tmp_path / 'red.png')
    monkeypatch.setattr(sys, 'path', [*sys.path])
    assert main([
        'probe', 'test_vit_pos_enc@random', '--import', str(file), '--pos-enc', 'failing', '--image',
        str(tmp_path / 'red.png')]) == 2
    assert f'{file}, line 7, ValueError: not enough values to unpack' in capsys.readouterr().err
