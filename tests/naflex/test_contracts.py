"""The contracts of the plain host that say nothing about one size of images, kept by NaFlexVit on plain images."""
import pytest
import test_block_arguments
import test_dropped_patches
import test_features_and_heads
import test_hooks_and_calls
import test_initial_values
import test_numerics
import test_parameter_groups
import test_prefix_tokens
import test_repeated_passes
import test_saving_and_loading
import test_shapes_and_grids
import torch.nn.functional as F
from common import POS_ENCS, Maker, ToyLayer, ToyShared, registered

from timm_sape import NaFlexVitPosEnc

# The others set arguments that timm's NaFlexVit does not have (dynamic_img_size, no_embed_class, is_causal), or name
# entries and methods of the plain ViT; test_host.py has these subjects for NaFlexVit.
CONTRACTS = {
    test_block_arguments: (
        'qk_norm', 'position_dropout', 'attention_dropout', 'projection_dropout', 'drop_path', 'layer_scale'),
    test_dropped_patches: ('no_patch_left', 'patch_dropout_mask'),
    test_features_and_heads: (
        'forward_features', 'forward_intermediates', 'prune_intermediate_layers', 'reset_classifier'),
    test_hooks_and_calls: ('own_call',),
    test_initial_values: ('fix_init', 'meta_device'),
    test_numerics: ('fused_attention_switch', 'autocast', 'float32_bias'),
    test_parameter_groups: ('head_is_last',),
    test_prefix_tokens: ('prefix_rule',),
    test_repeated_passes: ('gradient_checkpointing', 'deterministic', 'surroundings'),
    test_saving_and_loading: ('deepcopy', 'pickled', 'config'),
    test_shapes_and_grids: ('rectangular', 'relative'),
}
USUAL = ('ape', 'cope', 'rope_dinov3', 'sape2_k')  # the others run with --full


@pytest.fixture(autouse=True)
def third_party():
    with registered(ToyShared, ToyLayer):
        yield


@pytest.mark.one_of(2, all_kinds=False)
@pytest.mark.parametrize('name, contract, pos_enc', [
    pytest.param(name, module.contracts[name], pos_enc, marks=[] if pos_enc in USUAL else pytest.mark.full)
    for module, names in CONTRACTS.items() for name in names for pos_enc in POS_ENCS],
    ids=lambda value: value if isinstance(value, str) else '')
def test_contract(name, contract, pos_enc):
    contract(Maker(pos_enc, host='naflexvit'))


def reads_the_table(self, x):
    table = self.embeds.pos_embed
    table = None if table is None else F.pad(table.flatten(1, 2), (0, 0, self.num_prefix_tokens, 0))
    return {'pos_embed': table, 'patch_size': self.patch_size}


def test_a_table_read_outside_of_its_module_is_noticed(monkeypatch):
    """accelerate would have it on the meta device then."""
    contract = test_hooks_and_calls.contracts['own_call']
    monkeypatch.setattr(NaFlexVitPosEnc, '_given', reads_the_table)
    with pytest.raises(AssertionError, match='embeds.pos_embed'):
        contract(Maker('ape', host='naflexvit'))
