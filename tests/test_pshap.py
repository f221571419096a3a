"""Position-SHAP against its definition, against Kernel SHAP, and on models whose answer is known."""
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import shap
import timm
import torch
import torch.nn as nn

import timm_sape
from common import POS_ENCS, ToyLayer, ToyShared, randomize, registered
from harness import assert_near
from timm_sape.analysis import attributions, position_shap, shuffle_patches
from timm_sape.analysis.pshap import _order

EVERY = ['ape', 'rope2d_mixed', 'sape2_k', 'rpb', 'irpe_qkv', 'lape', 'peg', 'ope', 'alibi2d', 'ape+auto_cope']


def build(pos_enc, **kwargs):
    kwargs = dict(img_size=(16, 24), patch_size=8, num_classes=5, drop_rate=0.) | kwargs
    model = timm.create_model('test_vit_pos_enc', pos_enc=pos_enc, **kwargs).double().eval()
    with torch.no_grad():
        return randomize(model)


def partly_in_training():
    model = build('ape')
    model.blocks[0].train()
    return model


def graft_with_a_table():
    base = timm.create_model(
        'naflexvit_base_patch16_gap', img_size=(16, 24), patch_size=8, embed_dim=64, depth=1, num_heads=4,
        num_classes=5)
    return timm_sape.graft(base, 'nope').double().eval()


def data(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, 16, 24, dtype=torch.float64, generator=generator)
    return x, torch.randint(5, (n,), generator=generator)


def definition(model, x, y, background, seed=0):
    """Section G literally: one pair of images and one forward pass at a time."""
    order = [_order(i + 1_000_003 * seed, 6) for i in range(len(x))]

    def f(i, label, permutation):
        image, kwargs = x[i:i + 1], {}
        if permutation is not None:
            if 'ope' in model.encodings:
                objects = model.encodings['ope'].find_objects(image, timm_sape.Grid(2, 3), (8, 8))
                kwargs = {'object_index': objects}
            image = shuffle_patches(image, (8, 8), permutation[None])
        with torch.no_grad():
            return model(image, **kwargs)[0, label].item()

    position, image = [], []
    for start in range(0, len(x), 2 * background):
        end = min(start + 2 * background, len(x))
        middle = start + (end - start) // 2
        for mine, others in ((range(start, middle), range(middle, end)), (range(middle, end), range(start, middle))):
            for i in mine:
                pe = im = 0
                for b in others:
                    both, only_image = f(i, y[i], None), f(i, y[i], order[b])
                    only_position, neither = f(b, y[i], None), f(b, y[i], order[b])
                    pe += (only_position - neither + both - only_image) / 2 / len(others)
                    im += (only_image - neither + both - only_position) / 2 / len(others)
                position.append(pe)
                image.append(im)
    return torch.tensor(position, dtype=torch.float64), torch.tensor(image, dtype=torch.float64)


@pytest.mark.parametrize('pos_enc', EVERY)
def test_definition(pos_enc):
    model, (x, y) = build(pos_enc), data(10)
    found = position_shap(model, [(x, y)], background=3, batch_size=7, seed=2)
    position, image = definition(model, x, y, 3, seed=2)
    assert found.values.shape == (10,) and position.abs().max() > 1e-6
    assert_near(found.position.double(), position, 1e-4)
    assert_near(found.image.double(), image, 1e-4)
    values = found.position.abs() / (found.position.abs() + found.image.abs())
    assert torch.equal(found.values, values) and torch.equal(found.labels, y)
    with torch.no_grad():
        correct = model(x).argmax(1) == y
    assert torch.equal(found.correct, correct)
    if correct.any():
        assert found.value == pytest.approx(values[correct].mean().item())


def test_batches_and_their_sizes_do_not_matter():
    model, (x, y) = build('ape'), data(23)
    whole = position_shap(model, [(x, y)], background=4)
    parts = position_shap(model, zip(x.split(5), y.split(5)), background=4, batch_size=3)
    assert len(whole.values) == 23
    assert_near(parts.values, whole.values, 1e-5)
    other = position_shap(model, [(x, y)], background=4, seed=1)
    assert (other.values != whole.values).any()
    assert len(position_shap(model, [(x[:9], y[:9])], background=4).values) == 8  # one is left over


def test_kernel_shap():
    """The `shap` package explains the same with two features, the number of the image and that of its positions."""
    model, (x, y) = build('ape+rope2d'), data(8)
    found = position_shap(model, [(x, y)], background=4)
    order = torch.stack([_order(i, 6) for i in range(8)])
    for i, others in ((1, range(4, 8)), (6, range(4))):
        def f(rows):  # a row is the number of an image, and the number of a permutation or -1 for none
            out = []
            for image, permutation in rows.astype(int):
                picture = x[image:image + 1]
                if permutation >= 0:
                    picture = shuffle_patches(picture, (8, 8), order[permutation:permutation + 1])
                with torch.no_grad():
                    out.append(model(picture)[0, y[i]].item())
            return np.array(out)

        explainer = shap.KernelExplainer(f, np.array([[b, b] for b in others]))
        image, position = explainer.shap_values(np.array([[i, -1]]), silent=True)[0]
        assert abs(position - found.position[i].item()) < 1e-5
        assert abs(image - found.image[i].item()) < 1e-5


def test_exchanging_patches_is_exchanging_positions():
    """With `ape` one can do it by hand: a table with exchanged rows gives the same logits."""
    model, (x, _) = build('ape'), data(1)
    order = torch.tensor([[3, 0, 5, 1, 4, 2]])
    exchanged = model(shuffle_patches(x, (8, 8), order))
    place = order[0].argsort()  # where each patch has gone
    with torch.no_grad():
        model.pos_embed[:, 1:] = model.pos_embed[:, 1:][:, place]
    assert_near(model(x), exchanged, 1e-12)


@pytest.fixture(scope='module')
def third_party():
    with registered(ToyShared, ToyLayer):
        yield


@pytest.mark.parametrize('pos_enc', POS_ENCS)
def test_exchanging_patches_is_exchanging_positions_for_every_encoding(pos_enc, third_party):
    """The other way round: patches stay, but the grid says that they are elsewhere, for the tokens and each layer."""
    model, x = build(pos_enc, reg_tokens=2), data(3)[0]
    order = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(i)) for i in range(3)])
    place = order.argsort(1)  # where each patch has gone
    kwargs = {}
    if 'ope' in pos_enc.split('+'):
        kwargs['object_index'] = torch.arange(6).expand(3, -1)  # objects belong to places
    exchanged = model(shuffle_patches(x, (8, 8), order), **kwargs)

    def embed(encodings, args, out):
        tokens, grid, given = args
        p = grid.num_prefix_tokens
        found = []
        for i in range(3):  # tokens in the order of the places, then back
            one = tokens[i:i + 1]
            there = torch.cat([one[:, :p], one[:, p:][:, order[i]]], dim=1)
            objects = given['object_index'][i:i + 1] if kwargs else None
            put = encodings.embed(there, grid, {**given, 'images': x[i:i + 1], 'object_index': objects})
            found.append(torch.cat([put[:, :p], put[:, p:][:, place[i]]], dim=1))
        return torch.cat(found), out[1]

    def elsewhere(block, args):
        tokens, attn_mask, is_causal, position = args
        return tokens, attn_mask, is_causal, model.encodings.position(
            tokens, replace(position.grid, keep_indices=place))

    model.encodings.register_forward_hook(embed)
    for block in model.blocks:
        block.register_forward_pre_hook(elsewhere)
    with torch.no_grad():
        assert_near(model(x, **kwargs), exchanged.detach(), 1e-9)


def test_objects_stay_where_they_are():
    """`ope` finds objects in the original image. Only the places of patches are exchanged."""
    model, (x, y) = build('ope'), data(4)
    x[:, :, :8] = 3.
    seen = []
    model.encodings.register_forward_pre_hook(lambda module, args: seen.append(args[2]['object_index']))
    position_shap(model, [(x, y)], background=2)
    given = [index for index in seen if index is not None]
    own = model.encodings['ope'].find_objects(x, timm_sape.Grid(2, 3), (8, 8))
    assert given and all(any(torch.equal(row, o) for o in own) for index in given for row in index)


def test_each_layer_on_its_own():
    model, (x, y) = build('rope2d', depth=1), data(4)
    found = position_shap(model, [(x, y)], background=2, per_layer=True)
    original = model.encodings['rope2d'].rotation

    def f(i, label, permuted):
        image = x[i:i + 1]
        if permuted is not None:
            order = _order(permuted + 7919, 6)
            model.encodings['rope2d'].rotation = lambda grid: original(grid)[order]
            image = shuffle_patches(image, (8, 8), _order(permuted, 6)[None])  # for encodings on the tokens
        with torch.no_grad():
            out = model(image)[0, label].item()
        model.encodings['rope2d'].__dict__.pop('rotation', None)
        return out

    i, others = 0, (2, 3)
    expected = sum(f(b, y[i], None) - f(b, y[i], b) + f(i, y[i], None) - f(i, y[i], b) for b in others) / 4
    assert abs(expected) > 1e-6
    assert found.position[0].item() == pytest.approx(expected, rel=1e-3)
    ape = build('ape')
    together, apart = (position_shap(ape, [(x, y)], background=2, per_layer=p) for p in (False, True))
    assert_near(together.values, apart.values, 1e-5)


def test_layers_have_orders_of_their_own():
    model, (x, y), seen = build('rope2d', depth=3), data(4), []
    for block in model.blocks:
        block.attn.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs['position'].grid.keep_indices), with_kwargs=True)
    position_shap(model, [(x, y)], background=2, per_layer=True)
    passes = [orders for orders in zip(*3 * [iter(seen)]) if orders[0] is not None]
    assert passes and not any(torch.equal(a, b) for orders in passes for a, b in combinations(orders, 2))


def test_a_model_that_ignores_position_scores_0():
    found = position_shap(build('nope'), [data(8)])
    assert found.values.max() < 1e-5


def test_a_model_that_ignores_the_image_scores_1():
    """It sees only a channel that is the same in all images, so its output depends only on position."""
    x, y = data(8)
    x[:, 0] = x[0, 0]
    model = build('ape')
    with torch.no_grad():
        model.patch_embed.proj.weight[:, 1:] = 0
    found = position_shap(model, [(x, y)])
    assert (found.values > 1 - 1e-5).all() and (found.position.abs() > 1e-6).all()


def test_attributions_add_up():
    values = torch.randn(4, 100, dtype=torch.float64)
    position, image = attributions(*values)
    assert_near(position + image, values[0] - values[3], 1e-12)
    same = attributions(values[0], values[1], values[1], values[3])  # players with the same effect get the same value
    assert_near(same[0], same[1], 1e-12)


def test_cost():
    class Counted(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.patch_embed, self.images = model, model.patch_embed, 0

        def forward(self, x):
            self.images += len(x)
            return self.model(x)

    model = Counted(build('ape').float()).eval()
    x, y = data(64)
    position_shap(model, [(x.float(), y)])
    assert model.images == 64 * (16 + 2)  # passes over the images; 30 are allowed


@pytest.mark.parametrize('call, text', [
    (lambda x, y: position_shap(nn.Linear(2, 2).eval(), [(x, y)]), 'Linear does not cut images into separate patches'),
    (lambda x, y: position_shap(timm.create_model('pvt_v2_b0').eval(), [(x, y)]), 'does not cut images into'),
    (lambda x, y: position_shap(timm.create_model('vit_tiny_r_s16_p8_224', depth=1).eval(), [(x, y)]), 'does not cut'),
    (lambda x, y: position_shap(build('ape'), [(x, y + 5)]), 'the model has 5 classes'),
    (lambda x, y: position_shap(build('ape'), [(x[:1], y[:1])]), 'at least two images'),
    (lambda x, y: position_shap(build('ape'), [(x, y - 5)]), 'images need labels'),
    (lambda x, y: position_shap(build('ape'), [(x, y)], background=0), 'background must be 1 or more'),
    (lambda x, y: position_shap(build('ape'), [(x, y)], background=2.5), 'background must be 1 or more, an integer'),
    (lambda x, y: position_shap(build('ape'), [(x, y)], batch_size=0), 'batch_size must be 1 or more'),
    (lambda x, y: position_shap(build('ape'), [(x, y)], seed=1.5), 'seed must be 0 or more, an integer, got 1.5'),
    (lambda x, y: position_shap(build('ape'), [(x, y.double())]), r'integers \[B\] = \[4\], got torch.float64 \[4\]'),
    (lambda x, y: position_shap(build('ape'), [(x, y.to(torch.complex64))]), r'got torch.complex64 \[4\]'),
    (lambda x, y: position_shap(build('ape'), [(x, y[:, None])]), r'got torch.int64 \[4, 1\]'),
    (lambda x, y: position_shap(build('ape'), [(x, y[:3])]), r'got torch.int64 \[3\]'),
    (lambda x, y: position_shap(timm.create_model('test_vit').double(), [(x, y)], per_layer=True), 'Leave it out'),
    (lambda x, y: position_shap(graft_with_a_table(), [(x, y)], per_layer=True), 'has by itself'),
    (lambda x, y: position_shap(build('ape').train(), [(x, y)]), r'call model.eval\(\) first'),
    (lambda x, y: position_shap(partly_in_training(), [(x, y)]), r'call model.eval\(\) first'),
    (lambda x, y: position_shap(build('ape', num_classes=0), [(x, y)]), 'no classes, only features'),
    (lambda x, y: position_shap(build('ape', global_pool=''), [(x, y)]), r'must be \[B, classes\], got \[4, 7, 5\]'),
    (lambda x, y: position_shap(build('ape').half(), [(x.half(), y)]), r'rounding errors in torch.float16: call model'),
    (lambda x, y: position_shap(build('ape').bfloat16(), [(x.bfloat16(), y)]), 'rounding errors in torch.bfloat16'),
    (lambda x, y: shuffle_patches(x, (5, 8), torch.zeros(4, 6)), 'Patches of 5 x 8 do not divide images of 16 x 24'),
])
def test_what_is_wrong(call, text):
    with pytest.raises(ValueError, match=text):
        call(*data(4))


def test_labels_of_other_types_and_another_default_device():
    model, (x, y) = build('ape'), data(4)
    expected = position_shap(model, [(x, y)], background=2)
    for labels in (y, y.tolist(), y.to(torch.uint8)):
        with torch.device('meta'):
            found = position_shap(model, [(list(x), labels)], background=2)
        assert torch.equal(found.position, expected.position) and torch.equal(found.labels, expected.labels)


@pytest.mark.parametrize('broken', range(5))
def test_logits_that_are_not_finite(broken):
    """Of classes that are no label, too."""
    model = build('ape')
    model.head.bias.data[broken] = torch.nan
    with pytest.raises(ValueError, match='logits that are not finite'):
        position_shap(model, [(data(4)[0], torch.tensor([0, 1, 2, 3]))])


@pytest.mark.parametrize('labels, warns', [
    ([0] * 8 + [1] * 8, True), ([1] * 8 + [0] * 8, True), ([0] * 16, False), ([0] * 7 + [1, 0] + [1] * 7, False),
    ([0] * 4 + [1] * 4, False), (list(range(5)) * 2 + [4] * 8, False), ([0] * 15 + [1], False),
    ([1] + [0] * 99, False)])
def test_images_in_the_order_of_their_classes(labels, warns, recwarn):
    position_shap(build('nope'), [(data(len(labels))[0], torch.tensor(labels))], background=2)
    assert warns == any('order of their classes, so P-SHAP comes out too high' in str(w.message) for w in recwarn)


def test_the_largest_seed():
    assert position_shap(build('ape'), [data(4)], background=2, seed=2 ** 63 - 1).position.isfinite().all()
