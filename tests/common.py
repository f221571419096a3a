"""Shared by the contract tests: small models of any encoding on odd grids, and third-party encodings."""
import zlib
from contextlib import contextmanager

import pytest
import timm
import torch
import torch.nn as nn

import timm_sape
from timm_sape import PositionEncoding
from timm_sape.encodings.registry import names

PATCH = 8
HEADS = 4
GRIDS = [(3, 5), (1, 7), (14, 14)]
COMPOSITIONS = [
    'ape+sape2_k', 'ape+rope2d_mixed', 'ape+auto_rope2d+auto_sape2_k', 'cope+rope2d+sape2_qk',
    'ape+toy_layer+toy_shared']
torch.set_num_threads(1)  # these models are too small for more

# Each registered encoding, before any test registers more; with 'ape' if it does nothing on its own.
POS_ENCS = [
    name if timm_sape.get_encoding(name).alone else f'ape+{name}' for name in timm_sape.list_encodings()
] + COMPOSITIONS
# One of each kind, for tests that take seconds; the others run with --full.
OFTEN = [
    'ape', 'cpb', 'irpe_qkv', 'peg', 'sape2_k', 'cope', 'pape', 'auto_rope2d', 'ape+toy_layer+toy_shared']
FEW = ['peg', 'sape2_k', 'auto_rope2d']  # for tests that take five seconds or more
# Keywords of the models in the contracts. Positions must not change at random in training. And logits must not be so
# large (squares of large codes) that in low precision the rounding of q and k hides mistakes.
KEYWORDS = {
    'cape': {'max_global_shift': 0, 'max_local_shift': 0, 'max_scale': 1},
    'comrope': {'block_size': 4},  # two blocks: of one, two factors are drawn, whose size says little
    'pape': {'num_parabolas': 4},
    'sape2sq_k': {'bias_scale': 0.1},
    'sape2sq_q': {'bias_scale': 0.1},
}


def rarely(pos_encs, often=OFTEN):
    """Parameters of a test that takes long: those that are not among `often` are marked `full`."""
    return [pytest.param(pos_enc, marks=[] if pos_enc in often else pytest.mark.full) for pos_enc in pos_encs]


def images(grid, batch=2, seed=0):
    """Images of `grid` patches, `[B, 3, H*8, W*8]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, grid[0] * PATCH, grid[1] * PATCH, generator=generator)


@torch.no_grad()
def randomize(model):
    """Give every parameter large random values, the same in every model for the same name and shape.

    With initial values, position matters so little that a mistake in it could pass for rounding.
    """
    for name, p in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.removeprefix('model.').encode()))
        noise = torch.randn(p.shape, generator=generator).to(p)
        if name.endswith('gate.weight'):  # the gate is 100 times this value
            p.copy_(0.01 + 0.002 * noise)
        elif p.min() == p.max():  # gains, norms, biases and tables that start as a constant
            p.add_(noise, alpha=0.2)
        elif name.endswith('comrope.factors'):  # of other parameters
            p.copy_(3 * noise)
        elif 'encodings.' in name:
            p.copy_(0.3 * noise)
        else:
            is_table = p.ndim == 3 or name.endswith('pos_embed')  # 3-D: tokens and pos_embed; a NaFlexVit's has 4
            p.copy_(noise * (0.5 if is_table else p[0].numel() ** -0.5))
    return model


class Maker:
    """Makes models with one encoding: `maker(reg_tokens=4)`.

    Args:
        pos_enc: The encoding.
        grid: Grid of the models, unless an img_size is given in the call.
        edit: Called with every new model. Negative controls use it to break the model.
        host: 'vit' or 'naflexvit'.
        fixed: Arguments that override those of the call.
    """

    def __init__(self, pos_enc, grid=(3, 5), edit=None, host='vit', **fixed):
        self.pos_enc = pos_enc
        self.grid = grid
        self.edit = edit
        self.host = host
        self.fixed = fixed

    def __call__(self, random=True, **kwargs):
        defaults = dict(
            pos_enc=self.pos_enc, img_size=self.img_size(), patch_size=PATCH, embed_dim=32, depth=2, num_heads=HEADS,
            num_classes=3, reg_tokens=4, global_pool='avg', fc_norm=False)
        parts = self.pos_enc.split('+')
        defaults['pos_enc_kwargs'] = {name: KEYWORDS[name] for name in parts if name in KEYWORDS}
        # Patches are pooled, because the output of a class token does not depend on the bias of the last layer, which
        # is zero in its row.
        model = timm.create_model(f'test_{self.host}_pos_enc', **{**defaults, **kwargs, **self.fixed}).eval()
        model = randomize(model) if random else model
        if self.edit is not None:
            self.edit(model)
        return model

    def img_size(self, grid=None):
        height, width = grid or self.grid
        return height * PATCH, width * PATCH

    def images(self, batch=2, grid=None, seed=0):
        return images(grid or self.grid, batch, seed)


@contextmanager
def registered(*classes, **named):
    """Within this context, register encodings: classes by their attribute `name`, or by keyword."""
    named.update({cls.name: cls for cls in classes})
    try:
        for name, cls in named.items():
            timm_sape.register_encoding(name)(cls)
        yield
    finally:
        for name in named:
            names._encodings.pop(name, None)


class Executed:
    """What a pickle of it executes: it makes a file."""
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (self.file, 'w')


class ToyShared(PositionEncoding):
    """A third-party encoding that all layers share, with several hooks that no built-in encoding combines."""
    name = 'toy_shared'
    per_layer = False

    def __init__(self, *, device=None, dtype=None, **host):
        super().__init__(**host)
        self.factor = nn.Parameter(torch.empty(self.dim, device=device, dtype=dtype))
        self.slope = nn.Parameter(torch.empty(self.num_heads, 1, device=device, dtype=dtype))
        self.register_buffer('distance', self._compute(self._own_grid(), device).to(dtype), persistent=False)
        self.reset_parameters()

    def _own_grid(self):
        return timm_sape.Grid(*self.grid_size)

    def _compute(self, grid, device=None):
        position = grid.coordinates(device, torch.float32)
        return (position[:, None] - position).abs().sum(-1)  # [H*W, H*W]

    def reset_parameters(self):
        nn.init.ones_(self.factor)
        nn.init.ones_(self.slope)
        self.init_non_persistent_buffers()

    def init_non_persistent_buffers(self):
        self.distance.copy_(self._compute(self._own_grid(), self.distance.device))

    def set_grid_size(self, grid_size):
        super().set_grid_size(grid_size)
        distance = self._compute(self._own_grid(), self.distance.device).to(self.distance.dtype)
        self.register_buffer('distance', distance, persistent=False)

    def embed(self, x, grid):
        y, _ = grid.coordinates(x.device, x.dtype).unbind(-1)
        term = torch.outer((0.3 * y).cos(), torch.arange(self.dim, device=x.device, dtype=x.dtype).cos())  # [H*W, D]
        return grid.keep_tokens(grid.pad_tokens(term))

    def mix(self, x, term, grid):
        return x * self.factor, term

    def position_bias(self, grid):
        if grid.matches(self.grid_size):
            distance = self.distance
        else:
            distance = self._compute(grid, self.distance.device).to(self.distance.dtype)
        return grid.between_tokens(-self.slope[..., None] * distance)  # [(B,) h, N, N]


class ToyLayer(PositionEncoding):
    """A third-party encoding of each layer, with a bias from geometry and a term for values."""
    name = 'toy_layer'

    def __init__(self, *, device=None, dtype=None, **host):
        super().__init__(**host)
        self.vectors = nn.Parameter(torch.empty(2, self.head_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.trunc_normal_(self.vectors, std=0.02)

    def _rows(self, grid):
        return (grid.coordinates(self.vectors.device, self.vectors.dtype) @ self.vectors).sin()[None]  # [1, H*W, d]

    def position_bias(self, grid):
        rows = self._rows(grid)
        return grid.between_tokens((rows @ rows.transpose(-2, -1))[0])  # [(B, 1,) N, N]

    def values(self, attn, grid):
        rows = grid.keep_rows(self._rows(grid))
        return attn[..., grid.num_prefix_tokens:].to(rows.dtype) @ rows  # [B, h, N, d]
