"""Every encoding with every other: they work together, or the message says why not."""
import itertools

import pytest
import timm
import torch

import timm_sape
from common import PATCH, randomize

NAMES = [name for name in timm_sape.list_encodings() if name != 'nope']
ROTATIONS = {'turn', 'rotation'}


def hooks(name):
    return {hook for hook in timm_sape.PositionEncoding.HOOKS if timm_sape.get_encoding(name).overrides(hook)}


def embeds(name):
    """Whether the encoding adds to the tokens before the first block."""
    return 'embed' in hooks(name) and not timm_sape.get_encoding(name).per_layer


def refusal(a, b):
    """The reason not to combine two encodings, None if there is none."""
    if {a, b} == {'ape', 'lape'}:
        return "'lape' cannot be combined with 'ape': it is 'ape' passed from layer to layer"
    if ROTATIONS & hooks(a) and ROTATIONS & hooks(b):
        return 'two rotations'
    if 'mix' in hooks(a) | hooks(b) and not embeds(a) and not embeds(b):
        return 'mixes tokens with their position terms, but no part adds such a term'
    return None


def build(pos_enc):
    torch.manual_seed(0)
    return randomize(timm.create_model(
        'test_vit_pos_enc', pos_enc=pos_enc, img_size=(2 * PATCH, 3 * PATCH), patch_size=PATCH, embed_dim=32, depth=2,
        num_heads=4, mlp_ratio=1, num_classes=3, reg_tokens=1, global_pool='avg', fc_norm=False))


@pytest.mark.parametrize('a', [
    pytest.param(name, marks=pytest.mark.full if i % 8 else []) for i, name in enumerate(NAMES)])
def test_pairs(a):
    """Both encodings act and learn."""
    x = torch.randn(2, 3, 2 * PATCH, 3 * PATCH, generator=torch.Generator().manual_seed(0))
    for b in NAMES[NAMES.index(a) + 1:]:
        pos_enc, reason = f'{a}+{b}', refusal(a, b)
        if reason is not None:
            with pytest.raises(ValueError, match=reason):
                build(pos_enc)
            continue
        model = build(pos_enc).eval()
        out = model(x)
        assert out.isfinite().all(), pos_enc
        out.square().sum().backward()
        silent = [
            name for name, p in model.named_parameters()
            if ('encodings.' in name or name == 'pos_embed') and not p.grad.abs().max() > 0]
        assert not silent, f'{pos_enc}: no gradient for {silent}'
        for name in (a, b):
            if not timm_sape.get_encoding(name).alone:
                continue
            alone = build(name).eval()
            alone.load_state_dict({k: v for k, v in model.state_dict().items() if k in alone.state_dict()})
            assert (alone(x) - out).abs().max() > 1e-5, f'{pos_enc} is {name} alone'


def test_all_at_once():
    """A rotation, a mixer and all other encodings together, without gates and with them."""
    everything = [
        name for name in NAMES if name not in ('lape',) and (not ROTATIONS & hooks(name) or name == 'rope2d_mixed')]
    gated = [
        f'auto_{name}' if timm_sape.get_encoding(name).gate_init is not None else name for name in everything]
    x = torch.randn(2, 3, 2 * PATCH, 3 * PATCH, generator=torch.Generator().manual_seed(0))
    for names in (everything, gated):
        model = build('+'.join(names))
        assert model.pos_enc == '+'.join(sorted(names))
        model.train()(x).square().sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        order = list(itertools.islice(reversed(sorted(names)), len(names)))
        assert build('+'.join(order)).pos_enc == model.pos_enc


def test_refused_alone():
    alone = {name: timm_sape.get_encoding(name).alone for name in NAMES}
    for name in NAMES:
        if alone[name]:
            build(name)
        else:
            with pytest.raises(ValueError, match='Add one, e.g.'):
                build(name)


def test_entrypoints_of_every_encoding():
    """All sizes, alone and with `ape` where that adds something; each with a default cfg."""
    for name in timm_sape.list_encodings():
        cls = timm_sape.get_encoding(name)
        for size, (dim, heads) in {
                'vit_tiny': (192, 3), 'vit_small': (384, 6), 'vit_base': (768, 12), 'test_vit': (64, 4)}.items():
            fits = cls.fits(dim, heads)
            with_ape = fits and name != 'nope' and refusal(name, 'ape') is None and not embeds(name)
            assert timm.is_model(f'{size}_{name}') == (fits and cls.alone)
            assert timm.is_model(f'{size}_{name}_ape') == with_ape
            for model in timm.list_models(f'{size}_{name}') + timm.list_models(f'{size}_{name}_ape'):
                cfg = timm.get_pretrained_cfg(model)
                assert cfg.input_size[0] == 3 and cfg.classifier == 'head' and not cfg.has_weights


@pytest.mark.one_of(3)
@pytest.mark.parametrize('name', [name for name in NAMES if timm_sape.get_encoding(name).alone])
def test_what_the_last_layer_says_to_the_class_token(name):
    """In the last layer only the class token's row of the logits matters. If it has no bias, nothing is learned there.

    With pooled patches something is. The encodings of all other layers learn after one step in either case.
    """
    # iRPE has a bucket for prefix tokens. Its bias on keys is the same for the whole row, which softmax ignores.
    heard = {
        'irpe_q': ['table_q'], 'irpe_qk': ['table_q'], 'irpe_qkv': ['table_q', 'table_v'], 'rope2d_mixed': ['freqs'],
        'liere': ['entries'], 'comrope': ['entries', 'factors'], 'string': ['entries', 'freqs'],
        'harope': ['entries', 'log_scale'], 'pope': ['phases']}
    for pool in ('token', 'avg'):
        torch.manual_seed(0)
        model = timm.create_model(
            f'test_vit_{name}', img_size=32, patch_size=8, num_classes=4, global_pool=pool, fc_norm=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        x, y = torch.randn(4, 3, 32, 32), torch.arange(4)
        for _ in range(2):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        dead = {
            key for key, p in model.named_parameters()
            if 'encodings.' in key and p.grad.abs().max() <= 1e-9}
        last = {key for key, _ in model.named_parameters() if key.startswith('blocks.1.attn.encodings.')}
        alive = {key for key in last if key.rsplit('.', 1)[1] in heard.get(name, [])}
        expected = last - alive if pool == 'token' else set()
        assert dead == expected, pool


@pytest.mark.parametrize('pos_enc', ['ape', 'rope2d', 'sape2_k', 'cope', 'ope', 'irpe_qkv'])
def test_empty_batch(pos_enc):
    model = timm.create_model('test_vit_pos_enc', pos_enc=pos_enc, img_size=32, patch_size=8, num_classes=7)
    assert model(torch.zeros(0, 3, 32, 32)).shape == (0, 7)
