"""Two processes under DDP and under FSDP2 give the gradients that one process gives for the same batch.

With --full the tests run this file once as a script in two processes (gloo, CPU), which save what they get.
"""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from batches import Twins, pictures
from batches import batch as naflex_batch
from common import Maker, ToyLayer, ToyShared, images, registered

import timm_sape
from timm_sape import Grid

CASES = {
    'ape+sape2_k': {'sape2_k': {'bias_scale': 'learned'}},
    'rope2d_mixed': {},
    'cope': {},
    'ape+toy_layer+toy_shared': {},
    'naflex ape+sape2_k': {},
    'naflex rope2d_mixed': {},
}
NAFLEX = 'naflex '  # before the encoding: on NaFlexVit, where the two processes get images of different sizes
MIXED = 'rope2d_mixed', 'string'  # their frequencies are not drawn in place
TIMEOUT = 180  # seconds for both processes, imports included


def make_model(pos_enc):
    # float64, so that the order of a sum does not matter
    if pos_enc.startswith(NAFLEX):
        twins = Twins(pos_enc.removeprefix(NAFLEX))
        return twins.naflex(twins()).train()
    return Maker(pos_enc)(pos_enc_kwargs=CASES[pos_enc]).train().double()


def loss_of(model, x):
    return model(x).square().mean()


def batch(pos_enc, rank=None, world_size=2):
    """The whole batch, or what one process gets of it."""
    if pos_enc.startswith(NAFLEX):
        x = naflex_batch(pictures([(2, 8), (5, 6), (8, 2), (3, 4)]))
        return x if rank is None else {name: tensor.chunk(world_size)[rank] for name, tensor in x.items()}
    x = images((3, 5), batch=4).double()
    return x if rank is None else x.chunk(world_size)[rank]


def ddp(model):
    return DistributedDataParallel(model)


def ddp_checkpointed(model):
    model.set_grad_checkpointing()
    return DistributedDataParallel(model)


def fsdp2(model):
    mesh = init_device_mesh('cpu', (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def initialized(pos_enc, **kwargs):
    """A model that is built without memory, wrapped, and initialized in its parts, as FSDP2's users do it."""
    model = fsdp2(timm.create_model('test_vit_pos_enc', pos_enc=pos_enc, device='meta', **kwargs))
    model.to_empty(device='cpu')
    model.init_weights()
    return {name: p.full_tensor().clone() for name, p in model.named_parameters()}


WRAPPERS = {wrap.__name__: wrap for wrap in (ddp, ddp_checkpointed, fsdp2)}


def main(folder):
    """The work of each of the two processes."""
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    results = {}
    with registered(ToyShared, ToyLayer):
        for pos_enc in CASES:
            for name, wrap in WRAPPERS.items():
                model = make_model(pos_enc)
                wrapped = wrap(model)
                loss_of(wrapped, batch(pos_enc, dist.get_rank(), dist.get_world_size())).backward()
                results[pos_enc, name] = {
                    key: (p.grad.full_tensor() if hasattr(p.grad, 'full_tensor') else p.grad).clone()
                    for key, p in model.named_parameters()}
                local = [p.to_local() if hasattr(p, 'to_local') else p for p in model.parameters()]
                results[pos_enc, name, 'held'] = sum(p.numel() for p in local)
    for pos_enc in MIXED:
        torch.manual_seed(dist.get_rank())
        results[pos_enc, 'initial'] = initialized(pos_enc)
    torch.save(results, Path(folder, f'{dist.get_rank()}.pt'))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(autouse=True, scope='module')
def third_party():
    with registered(ToyShared, ToyLayer):
        yield


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    """The results that the two processes saved. torchrun finds a free port, and ends one process if the other fails."""
    folder = tmp_path_factory.mktemp('distributed')
    command = [
        sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', __file__, str(folder)]
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)}  # with the folders of tests that pytest has added
    run = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT, env=env)
    assert run.returncode == 0, run.stdout[-4000:]
    return [torch.load(folder / f'{rank}.pt') for rank in range(2)]


@pytest.mark.full
@pytest.mark.parametrize('pos_enc', CASES)
@pytest.mark.parametrize('wrapper', WRAPPERS)
def test_gradients_of_one_process(wrapper, pos_enc, results):
    model = make_model(pos_enc)
    loss_of(model, batch(pos_enc)).backward()
    for result in results:
        grads = result[pos_enc, wrapper]
        assert grads.keys() == dict(model.named_parameters()).keys()
        for name, p in model.named_parameters():
            assert p.grad.abs().max() > 0, name
            torch.testing.assert_close(grads[name], p.grad, rtol=1e-9, atol=1e-12, msg=lambda m: f'{name}: {m}')


@pytest.mark.full
@pytest.mark.parametrize('pos_enc', CASES)
def test_processes_share_the_work(pos_enc, results):
    """The negative control: half of the batch gives other gradients, and FSDP2 really holds half of the parameters."""
    model = make_model(pos_enc)
    loss_of(model, batch(pos_enc, rank=0)).backward()
    for name, p in model.named_parameters():
        assert not torch.allclose(results[0][pos_enc, 'ddp'][name], p.grad, rtol=1e-3, atol=0), name
    total = sum(p.numel() for p in model.parameters())
    assert results[0][pos_enc, 'ddp', 'held'] == total
    assert max(result[pos_enc, 'fsdp2', 'held'] for result in results) < 0.6 * total


@pytest.mark.full
@pytest.mark.parametrize('pos_enc', MIXED)
def test_processes_hold_parts_of_one_initial_value(pos_enc, results):
    """Although each process drew values of its own."""
    first, second = (result[pos_enc, 'initial'] for result in results)
    freqs = f'blocks.0.attn.encodings.{pos_enc}.freqs'
    assert torch.equal(first[freqs], second[freqs])
    assert_mixed(first[freqs])


def assert_mixed(freqs):
    """x and y of each pair are cosine and sine of an angle, times a falling frequency."""
    magnitude = freqs.square().sum(0).sqrt().unflatten(-1, (2, -1))  # [h, 2, d/4]
    expected = 10 ** -torch.linspace(0, 1, magnitude.shape[-1] + 1)[:-1]
    torch.testing.assert_close(magnitude, expected.expand_as(magnitude))


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_initial_values_in_parts(one_process):
    """Every encoding, with random values as large as in a model that is built on the CPU."""
    cases = [(name, {}) for name in timm_sape.list_encodings() if timm_sape.get_encoding(name).alone]
    cases += [('sape2_k', {'separate_keys': 'identity'}), ('auto_rope2d_mixed', {})]
    for pos_enc, keywords in cases:
        kwargs = {'pos_enc_kwargs': {pos_enc: keywords}} if keywords else {}
        found = initialized(pos_enc, **kwargs)
        expected = dict(timm.create_model('test_vit_pos_enc', pos_enc=pos_enc, **kwargs).named_parameters())
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert value.isfinite().all(), (pos_enc, name)
            if value.numel() >= 64:  # else the draw decides
                std = expected[name].std(correction=0)
                torch.testing.assert_close(value.std(correction=0), std, rtol=0.5, atol=1e-6, msg=f'{pos_enc}, {name}')
        if pos_enc == 'auto_rope2d_mixed':
            assert_mixed(found[f'blocks.0.attn.encodings.{pos_enc}.freqs'])


def encoding_and_grid(pos_enc, **kwargs):
    grid = Grid(14, 14, num_prefix_tokens=1)
    encoding = timm_sape.create_encoding(
        pos_enc, dim=64, num_heads=2, grid_size=grid.size, num_prefix_tokens=1, depth=1, **kwargs)
    return encoding, grid


@pytest.mark.parametrize('pos_enc', ['rope1d', 'auto_rope1d', 'auto_rope2d', 'sincos2d', 'alibi2d', 'cape'])
def test_tables_that_fsdp_rounds(pos_enc):
    """As MixedPrecision(buffer_dtype=torch.bfloat16) does it: they are computed anew in each pass."""
    encoding, grid = encoding_and_grid(pos_enc)
    expected = encoding.table_for(grid).clone()
    encoding.table.data = encoding.table.data.bfloat16()
    assert not torch.allclose(encoding.table.float(), expected, rtol=0, atol=1e-3)
    torch.testing.assert_close(encoding.table_for(grid), expected, rtol=0, atol=1e-6)


def test_random_positions_where_fsdp_rounds_tables():
    """cape draws in the dtype of its table."""
    encoding, grid = encoding_and_grid('cape', max_global_shift=0, max_local_shift=0, max_scale=1 + 1e-9)
    x = torch.zeros(2, 197, 64)
    expected = encoding(x, grid=grid, hook='embed')
    encoding.table.data = encoding.table.data.bfloat16()
    torch.testing.assert_close(encoding(x, grid=grid, hook='embed'), expected, rtol=0, atol=1e-6)


if __name__ == '__main__':
    main(sys.argv[1])
