"""fire: a small MLP computes the bias of each distance, on a scale that ends at the largest one."""
import pytest
import timm
import torch

import reference_fire
from bias_checks import PAIRS_IN_RASTER_ORDER, SIZES, LearnedBiasTests, bias_of, check_layers_are_called
from harness import assert_near, create, where
from model_checks import check_uniform, initial_model, own_encodings
from timm_sape import Grid
from timm_sape.encodings import fire

DISTANCES = ['euclidean', 'manhattan']


def columns_only(self, dy, dx, distance=fire.FunctionalInterpolation._distance):
    return distance(self, 0 * dy, dx)


class TestFire(LearnedBiasTests):
    name = 'fire'
    variants = [{'distance': distance} for distance in DISTANCES]
    keywords = {'hidden': 4}
    model_variants = [{}, {'distance': 'manhattan', 'hidden': 8, 'threshold': 3.0}]
    mutants = {  # arguments of `check`, (owner, attribute, replacement)
        **LearnedBiasTests.mutants,
        'kept patches in raster order': (((3, 5), 1, 8), PAIRS_IN_RASTER_ORDER),
        'linear': (((3, 5), 0), (torch.Tensor, 'log1p', lambda self: self)),
        'threshold ignored': (((3, 5), 0, None, None, 50.0), (torch, 'maximum', lambda a, b: b)),
        'only the threshold': (((3, 5), 0), (torch, 'maximum', lambda a, b: a)),
        'rows not counted': (((3, 5), 0), (fire.FunctionalInterpolation, '_distance', columns_only)),
    }

    def new(self, *args, threshold=2.5, **keywords):
        encoding = super().new(*args, **keywords)
        with torch.no_grad():
            encoding.log_scale.fill_(-0.7)
            encoding.threshold.fill_(threshold)
        return encoding

    def check(self, grid_size, num_prefix_tokens=0, num_keep=None, own_size=None, threshold=2.5, **keywords):
        super().check(grid_size, num_prefix_tokens, num_keep, own_size, threshold=threshold, **keywords)

    def expected_bias(self, encoding, q, x, grid):
        fc1, fc2 = encoding.mlp.fc1, encoding.mlp.fc2
        parameters = encoding.log_scale, encoding.threshold, fc1.weight, fc1.bias, fc2.weight, fc2.bias
        return reference_fire.bias(*parameters, grid.size, distance=encoding.distance, **where(grid))

    @pytest.mark.parametrize('threshold', [0.3, 50.0])
    def test_threshold(self, threshold):
        """Below the largest distance it makes no difference, above it does."""
        self.check((3, 5), 1, threshold=threshold)


def test_layers_are_called():
    check_layers_are_called('fire')


# --- properties ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('distance', DISTANCES)
def test_distance_alone(distance):
    """The bias depends on the distance alone, so mirroring or turning the image moves it only."""
    encoding = create('fire', (4, 4), **SIZES, distance=distance)
    bias = bias_of(encoding, Grid(4, 4))[0].view(2, 4, 4, 4, 4)
    assert_near(bias[:, 1:, 1:, 1:, 1:], bias[:, :-1, :-1, :-1, :-1], 1e-12)
    for turned in (bias.flip(2, 4), bias.flip(1, 3), bias.permute(0, 2, 1, 4, 3)):
        assert_near(turned, bias, 1e-12)
    assert (bias[0] - bias[1]).abs().max() > 1e-3
    one, diagonal = bias[:, 0, 0, 0, 2], bias[:, 0, 0, 1, 1]  # two steps by Manhattan, sqrt(2) otherwise
    assert torch.allclose(one, diagonal) == (distance == 'manhattan')


def test_larger_images_stay_in_the_trained_range():
    """The MLP sees at most what it saw on the grid that the encoding was made for."""
    encoding, seen = create('fire', (7, 7), random=False, **SIZES), []
    encoding.mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0].amax().item()))
    for size in ((7, 7), (14, 14), (40, 9), (3, 3)):
        bias_of(encoding, Grid(*size))
    assert seen[:3] == pytest.approx([1, 1, 1], abs=1e-5) and seen[3] < 0.7


# --- initial values --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('again', [False, True])
def test_initial_values(again):
    """Those of torch for the layers, c = .1, and L the distance between opposite corners of the model's own grid."""
    encodings = own_encodings(initial_model('fire', again), 'fire')
    for encoding in encodings:
        height, width = encoding.grid_size
        assert encoding.log_scale.item() == pytest.approx(0.1)
        assert encoding.threshold.item() == pytest.approx(((height - 1) ** 2 + (width - 1) ** 2) ** 0.5)
        check_uniform(encoding.mlp.fc2.weight, 32 ** -0.5)
        assert encoding.mlp.fc1.weight.shape == (32, 1) and encoding.mlp.fc1.weight.abs().max() <= 1
    assert not torch.equal(encodings[0].mlp.fc2.weight, encodings[1].mlp.fc2.weight)
    assert 'threshold' in encodings[0].state_dict()
    assert create('fire', (3, 5), random=False, **SIZES, distance='manhattan').threshold.item() == 2 + 4
    paper = create('fire', random=False, **SIZES, log_scale=1.0, threshold=512)
    assert (paper.log_scale.item(), paper.threshold.item()) == (1, 512)


def test_initial_values_after_a_change_of_size():
    model = timm.create_model('test_vit_fire', img_size=32, patch_size=8)
    model.set_input_size(64)
    assert model.blocks[0].attn.encodings['fire'].threshold.item() == pytest.approx(18 ** 0.5)  # still the trained one
    model.init_weights()
    assert model.blocks[0].attn.encodings['fire'].threshold.item() == pytest.approx(98 ** 0.5)


# --- keywords --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('keywords, text', [
    ({'distance': 'axes'}, "'fire': distance must be 'euclidean' or 'manhattan', got 'axes'"),
    ({'hidden': 0}, "'fire' needs hidden to be a positive integer, got 0"),
    ({'hidden': 32.0}, "'fire' needs hidden to be a positive integer, got 32.0"),
    ({'log_scale': 0}, "'fire' needs log_scale to be a positive number, got 0"),
    ({'log_scale': None}, "'fire' needs log_scale to be a positive number, got None"),
    ({'threshold': -1}, "'fire' needs threshold to be a positive number, got -1"),
    ({'threshold': float('nan')}, "'fire' needs threshold to be a positive number, got nan"),
])
def test_wrong_keywords(keywords, text):
    with pytest.raises(ValueError, match=text):
        create('fire', **SIZES, **keywords)


def test_weights_of_other_keywords_do_not_fit():
    state = create('fire', **SIZES).state_dict()
    with pytest.raises(RuntimeError):
        create('fire', **SIZES, hidden=7).load_state_dict(state)
