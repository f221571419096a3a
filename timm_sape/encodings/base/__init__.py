"""What a position encoding is: a module that overrides one or more hooks, one for each place where position can act.

| hook | acts on | returns |
|---|---|---|
| `embed` | tokens, after the patch embedding or after a block | a term to add |
| `mix` | tokens and the sum of these terms | both, weighted |
| `layer_embed` | the input of each attention layer | a term for each layer |
| `turn` | q and k | what takes their place in the logits |
| `rotation` | q and k | a table of sines and cosines |
| `position_bias` | logits, by geometry alone | a bias between tokens |
| `content_bias` | logits, from q and k | a bias between tokens |
| `channels` | logits, from q, k and the tokens | more channels of q and k, whose product is the bias |
| `values` | values | a term for the output of attention |

Two further hooks add nothing themselves. `attend` computes attention with the bias of `content_bias` faster, without
forming that bias. `logit_factor` is for rules for other grids: what q.k is multiplied by.

*One rule for dropped patches*: everything that a hook gets or returns covers only the tokens in the sequence. If some
patches were dropped, `grid.keep_indices` lists those that remain. Methods of `Grid` reduce a result for the whole grid
to these tokens (`between_tokens`, `keep_rows`, `keep_tokens`), and the base classes below call them.

*Hooks run inside the module's own call*: a host never calls `encoding.position_bias(grid)` but
`encoding(x, grid=grid, hook='position_bias')`. This way forward hooks fire, and libraries that load, move, gather or
count parameters around a module's call see everything that an encoding computes. The first argument is always a tensor,
even if the hook needs none, because such libraries expect one.

To add an encoding, write it in a file next to this folder, decorate it with `register_encoding`, and import it in
`encodings/__init__.py`. Which base class?

| base | file | for |
|---|---|---|
| `PositionEncoding` | `position_encoding.py` | parameters that mean the same on any grid |
| `FixedEncoding` | `fixed.py` | a table that the grid alone determines, kept in a buffer |
| `RotaryEncoding`, `FixedRotaryEncoding` | `rotary.py` | rotations of pairs of channels: define the angles |
| `BlockRotaryEncoding` | `rotary.py` | rotations of larger blocks of channels: define their matrices |
| `ReferenceGridEncoding` | `saved_grid.py` | parameters that belong to the trained grid and are never resized |
| `ResizedEncoding` | `saved_grid.py` | parameters that belong to a grid and are resampled for another one |
| `CoordinateEncoding` | `coordinates.py` | functions of coordinates, which extrapolate or are rescaled elsewhere |
| `FrequencyEncoding` | `frequencies.py` | rotations by frequencies, which have more rules for another grid |
| `OffsetBiasEncoding` | `offset_bias.py` | fixed biases that depend only on the offset between two patches |

The other files are what they share: `gate.py`, `hook_results.py` (what hooks must return), `initial_values.py`, and
`layers.py` (layers that compute in at least float32).
"""
from .coordinates import CoordinateEncoding
from .fixed import FixedEncoding
from .frequencies import FrequencyEncoding, axial_frequencies
from .gate import AUTO, Gate
from .initial_values import fill_trunc_normal, fill_with
from .layers import Float32LayerNorm, Float32Linear
from .offset_bias import OffsetBiasEncoding, between_patches, per_head, slopes_for_any_heads
from .position_encoding import PositionEncoding
from .rotary import BlockRotaryEncoding, FixedRotaryEncoding, RotaryEncoding, rotation_table
from .saved_grid import ReferenceGridEncoding, ResizedEncoding
