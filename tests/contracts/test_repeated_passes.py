"""One forward pass has no effect on another: checkpointed, repeated, in other threads, beside other images."""
import copy
import random
import threading

import torch
from timm.layers import set_reentrant_ckpt

from contract_tools import ONE_GRID, Contracts, gradients, same, same_gradients

contracts = Contracts()


@contracts.add(takes_long=True)
def gradient_checkpointing(make):
    """The same loss and gradients as without it, reentrant or not, with every random layer on."""
    kwargs = dict(attn_drop_rate=0.2, proj_drop_rate=0.2, drop_path_rate=0.2, patch_drop_rate=0.2)
    x = make.images()

    def step(model):
        torch.manual_seed(0)
        loss = model(x).square().sum()
        return loss, gradients(model, loss)

    loss, expected = step(make(**kwargs).train())
    model = make(**kwargs).train()
    model.set_grad_checkpointing()
    loss_again, actual = step(model)
    same(loss_again, loss, 'loss', tol=1e-6)
    same_gradients(actual, expected)

    set_reentrant_ckpt(True)
    try:
        same_gradients(step(model)[1], expected)
    finally:
        set_reentrant_ckpt(False)

    model = make()
    loss, expected = step(model)
    model.set_grad_checkpointing()
    same(model.forward_intermediates(x)[0], make().forward_features(x), 'features')
    same_gradients(step(model)[1], expected)


@contracts.add
def deterministic(make):
    """In evaluation mode nothing is random, and neither other images of a batch nor earlier passes matter."""
    model = make()
    x = make.images(batch=3)
    state = torch.get_rng_state(), random.getstate()
    out = model(x)
    assert torch.equal(torch.get_rng_state(), state[0]) and random.getstate() == state[1], 'random numbers drawn'
    model(make.images(seed=1))
    assert torch.equal(model(x), out), 'another result the second time'
    for i in range(3):
        same(model(x[i:i + 1]), out[i:i + 1], 'one image of the batch')


@contracts.add(grids=ONE_GRID, takes_long=True)
def threads(make):
    """Eight threads use one model, each with images of its own size."""
    model = make(dynamic_img_size=True)
    batches = [make.images(grid=(2 + i % 3, 3 + i % 2), seed=i) for i in range(8)]
    with torch.inference_mode():
        expected = [model(x) for x in batches]
        actual = [[] for _ in batches]
        barrier = threading.Barrier(8)

        def work(i):
            with torch.inference_mode():  # the modes of torch are per thread
                barrier.wait()
                for _ in range(4):
                    actual[i].append(model(batches[i]))

        workers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        for found, b in zip(actual, expected):
            assert len(found) == 4, 'a thread died'
            for a in found:
                same(a, b, 'result of a thread', tol=1e-6)


@contracts.add(grids=ONE_GRID)
def surroundings(make):
    """Neither torch's default device nor the memory format of parameters changes a result."""
    model, x = make(), make.images()
    expected = model(x)
    with torch.device('meta'):
        same(model(x), expected, 'under another default device', tol=1e-6)
        built = make(random=False, device='cpu')
        assert not any(t.is_meta for t in built.state_dict().values()), 'not on the device that was asked for'
    same(model.to(memory_format=torch.channels_last)(x), expected, 'channels_last', tol=1e-6)


def snapshot(model):
    """Everything stored on modules and on classes of encodings, with a copy of what can be changed in place."""
    owners = [(name, vars(module)) for name, module in model.named_modules()]
    owners += [(type(m).__name__, vars(type(m))) for m in model.position_encodings().values()]
    stored = {}
    for name, attributes in owners:
        for key, value in attributes.items():
            for item, x in value.items() if isinstance(value, dict) else [('', value)]:
                if isinstance(x, torch.Tensor):
                    content = None if x.is_inference() else x._version
                else:
                    content = copy.copy(x) if isinstance(x, (list, set, dict)) else None
                stored[name, key, item] = x, content
    return stored


@contracts.add
def nothing_stored(make):
    """A forward pass stores nothing on any module, in evaluation or training."""
    x = make.images()
    for model in (make(dynamic_img_size=True), make(dynamic_img_size=True, patch_drop_rate=0.5).train()):
        before = snapshot(model)
        model(x).sum().backward()
        model(make.images(grid=(4, 6)))
        with torch.inference_mode():
            model(x)
            model(make.images(grid=(2, 7)))
        after = snapshot(model)
        assert after.keys() == before.keys(), f'stored in forward: {after.keys() ^ before.keys()}'
        for key, (value, content) in before.items():
            value_now, content_now = after[key]
            plain = isinstance(value, (int, float, str, tuple)) and value_now == value
            assert (value_now is value or plain) and content_now == content, f'stored in forward: {key}'
        gradients(model, model(x).square().sum())  # no tensor of inference mode is left over


@contracts.add(grids=ONE_GRID)
def hooks_in_place(make):
    """A hook that changes the output of an encoding in place, say for an ablation, changes nothing for good."""
    x, model = make.images(), make(class_token=False, global_pool='avg')
    with torch.no_grad():
        before = model(x)
        hooks = [
            encoding.register_forward_hook(lambda module, args, out: out.zero_() if torch.is_tensor(out) else None)
            for encoding in model.position_encodings().values()]
        model(x)
        for hook in hooks:
            hook.remove()
        same(model(x), before, 'after the hooks', tol=0)


test_contract = contracts.test()
