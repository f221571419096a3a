"""What holds for every encoding in a model, whatever its equations are."""
import pytest
import timm
import torch
from timm.layers import PatchDropoutWithIndices

import timm_sape
from harness import assert_near, make_model
from timm_sape.encodings.base.initial_values import fill_trunc_normal

ALONE = [name for name in timm_sape.list_encodings() if timm_sape.get_encoding(name).alone]


class Shuffle(PatchDropoutWithIndices):
    """Drops nothing, but changes the order of the patches, image by image."""

    def forward(self, x):
        p = self.num_prefix_tokens
        keep_indices = torch.stack([torch.randperm(x.shape[1] - p) for _ in range(x.shape[0])])
        patches = x[:, p:].gather(1, keep_indices[:, :, None].expand(-1, -1, x.shape[-1]))
        return torch.cat([x[:, :p], patches], dim=1), keep_indices


@pytest.mark.parametrize('name', ALONE)
def test_order_of_kept_patches(name):
    """The class token does not see in which order patches stand in the sequence."""
    torch.manual_seed(0)
    model = timm.create_model(f'test_vit_{name}', img_size=(24, 40), patch_size=8, patch_drop_rate=0.1).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        x = torch.randn(3, 3, 24, 40, dtype=torch.float64)
        expected = model(x)
        model.patch_drop = Shuffle(0.1, num_prefix_tokens=1)
        assert_near(model(x), expected, 1e-10)


@pytest.mark.parametrize('name', timm_sape.list_encodings())
def test_conversions_reach_everything(name):
    """In half precision, parameters are converted, and tables and other buffers keep all their digits.

    All but FIRE's largest distance, which is rounded like the weight that it is multiplied with. In double precision
    tables have all digits of that.
    """
    pos_enc = name if name in ALONE else f'ape+{name}'
    model = timm.create_model('test_vit_pos_enc', pos_enc=pos_enc, img_size=(24, 40), patch_size=8)
    buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}
    model.bfloat16()
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert all(
        torch.equal(buffer, buffers[key]) for key, buffer in model.named_buffers() if not key.endswith('.threshold'))
    model.double()
    assert all(t.dtype == torch.float64 for t in (*model.parameters(), *model.buffers()) if t.is_floating_point())
    built = timm.create_model(
        'test_vit_pos_enc', pos_enc=pos_enc, img_size=(24, 40), patch_size=8, dtype=torch.float64)
    assert all(
        torch.equal(buffer, built.get_buffer(key)) for key, buffer in model.named_buffers() if key.endswith('.table'))
    assert all(t.is_meta for t in (*model.to('meta').parameters(), *model.buffers()))


def test_same_backbone():
    """Siblings of one seed start from one backbone: they differ in their encodings alone."""
    plain = make_model('nope').state_dict()
    for name in ALONE:
        state = make_model(name).state_dict()
        assert all(torch.equal(state[key], value) for key, value in plain.items()), name
        own = 'pos_embed' if name == 'ape' else f'encodings.{name}.'
        assert all(own in key for key in state.keys() - plain.keys())


def test_same_images():
    """Siblings of one seed leave the generator, which shuffles the images, where timm's own ViT leaves it."""
    def left_by(name):
        torch.manual_seed(0)
        timm.create_model(name)
        return torch.get_rng_state()

    assert torch.equal(left_by('vit_tiny_patch16_224'), left_by('vit_tiny_sape2_k_ape'))
    assert torch.equal(left_by('vit_tiny_patch16_224'), left_by('vit_tiny_sape2_k_graft'))
    expected = left_by('test_vit_nope')
    assert all(torch.equal(left_by(f'test_vit_{name}'), expected) for name in ALONE)


def test_what_is_drawn_next_is_new():
    """Not the numbers that the tables were drawn from."""
    torch.manual_seed(0)
    model = timm.create_model('test_vit_sape2_k_ape')
    model.reset_classifier(10)
    table = model.blocks[0].attn.encodings['sape2_k'].table_x.flatten()
    pair = torch.stack([table, model.head.weight.flatten()[:len(table)]])
    assert torch.corrcoef(pair)[0, 1].abs() < 0.5


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_no_initial_value_is_far_off(dtype, monkeypatch):
    """The normal numbers are made of uniform ones. In float32 one in 2^24 of these is the lower end, made infinite."""
    monkeypatch.setattr(torch.Tensor, 'uniform_', lambda self, low, high: self.fill_(low))
    table = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    fill_trunc_normal(table, 0.02)
    assert (table.abs() > 0.1).all() and (table.abs() < 0.2).all()
