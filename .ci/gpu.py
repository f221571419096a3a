"""Checks and measurements on an NVIDIA GPU, in steps that are not repeated once they have succeeded.

    .ci/gpu OUT                     every stage, in the order of the table
    .ci/gpu OUT contact tests       some stages
    .ci/gpu OUT --minutes 9.5       stop in time, say where commands may take ten minutes; the next call goes on

| stage | what |
|---|---|
| `contact` | attention in bfloat16 at 14 x 14 against float64, then other dtypes and shapes |
| `tests` | the tests of the operators with compiled kernels |
| `operator` | the operator in CUDA graphs, by kernels; its benchmark `timm-sape bench sape2`: CSV files, a picture |
| `steps` | training steps: eager, compiled, CUDA graphs, checkpointed, two streams, without waiting; a profile |
| `sanitizer` | memcheck and racecheck on small inputs |
| `models`, `naflex` | the other benchmarks of `timm-sape bench`: CSV files |
| `tiles` | the kernels with other tiles, beside plain attention |
| `epoch` | one epoch of CIFAR-10 by timm's train.py, and how busy the GPU is |
| `plans` | the plans of `train_configs/gpu_cifar10`, as far as the time goes |

Works from a checkout, without installation and without a network, from torch 2.11, Triton 3.6 and timm 1.0.31 on.
Environment: `PYTHON`; `WHEELS`, a folder of wheels that are missing, say timm's; `TIMM_SCRIPTS`, a folder with timm's
train.py, and `CIFAR10`, the folder with `cifar-10-batches-py` in it, for `epoch` and `plans`, left out without them.

A step may take at most three times as long as it is expected to, so that one that hangs does not use up all the time.
The exit status is 75 if some had no time left. To go on on another machine, copy OUT there: steps that succeeded with
another GPU, other versions or another commit are repeated (two dirty trees of one commit look alike). What is not timed
may run side by side, which takes half as long:
`.ci/gpu OUT contact && (.ci/gpu OUT tests & .ci/gpu OUT sanitizer & wait)`.

After `contact`, `tests` and `sanitizer` have passed, enter the GPU in `TRITON_TESTED_ON` of timm_sape/ops/backend.py.
"""
import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
JOBS = min(14, os.cpu_count())  # contact and tests spend their time in compiling kernels, on the CPU
TRAINED = 'vit_small_ape', 'vit_small_sape2_k_ape'
CHECKS = f'{PYTHON} .ci/gpu_checks.py'
COMMAND = f'{PYTHON} -m timm_sape'
# Without the cache every tensor is an allocation of its own, so that reading past its end is seen.
SANITIZER = 'PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 --tool'
TESTS = {
    'kernels': 'tests/ops/test_triton_kernels.py tests/ops/test_backends.py tests/ops/test_sape2_attention.py '
               'tests/ops/test_hard_input.py',
    'models': 'tests/ops/test_backends_in_models.py tests/ops/test_mixed_dtypes.py '
              'tests/ops/test_second_derivatives.py tests/ops/test_torch_func.py '
              'tests/ops/test_different_devices.py tests/ops/test_operator_flops.py tests/ops/test_matrices.py '
              'tests/encodings/test_sape2_separate_keys.py::test_operators_in_half '
              'tests/encodings/test_sape2_separate_keys.py::test_zero_is_dead_with_triton',
}


def stages(out):
    """The steps of each stage: name, command, and the seconds that it is expected to take."""
    tests = [
        (f'tests-{name}', f'{PYTHON} -m pytest -q -n {JOBS} --maxfail=20 {files}', 120)
        for name, files in TESTS.items()]
    bench = f'--device cuda --amp --batch-size 128 --repeats 9 --force --output {out}'
    train = (
        f'{PYTHON} .ci/gpu_checks.py busy -- {COMMAND} run {os.environ.get("TIMM_SCRIPTS", "")}/train.py '
        f'--config train_configs/deit_cifar10/{{model}}.yaml --data-dir {os.environ.get("CIFAR10", "")} --epochs 1 '
        f'--warmup-epochs 0 --amp --amp-dtype bfloat16 --workers 4 --output {out}/train --experiment {{model}}')
    plan = (
        f'{COMMAND} experiment train_configs/gpu_cifar10/{{name}}.yaml --data-dir {os.environ.get("CIFAR10", "")} '
        f'--script {os.environ.get("TIMM_SCRIPTS", "")}/train.py --output {out}/{{name}} --jobs 3')
    images = (
        f'{COMMAND} data cifar10-subset --source {os.environ.get("CIFAR10", "")} --output {out}/images '
        '--per-class 4800 1000 --held-out 200')
    table = (
        f'{PYTHON} examples/reference_table.py --plan train_configs/gpu_cifar10/reference.yaml run --data-dir '
        f'{out}/images --script {os.environ.get("TIMM_SCRIPTS", "")}/train.py --output {out}/reference --jobs 3')
    sanitizer = [
        (f'{tool}-{dtype}', f'{SANITIZER} {tool}{options} {CHECKS} small --dtype {dtype}', 100)
        for tool, options in (('memcheck', ' --report-api-errors no'), ('racecheck', ''))
        for dtype in ('bfloat16', 'float32')]
    operator = f'{COMMAND} bench sape2 {bench}/sape2_gpu.csv --plot {out}/sape2_memory_gpu.png'
    steps = [
        (f'steps-{model}', f'{CHECKS} steps --models {model} --output {out}/steps_{model}.csv', 150)
        for model in ('vit_small_sape2_k_ape', 'vit_small_sape2sq_k_ape', 'vit_small_rope2d', 'vit_small_rpb')]
    large = (  # so many images that the GPU does not wait for the processor
        f'{CHECKS} steps --models vit_small_sape2_k_ape --backends triton --batch-size 512 --ways eager compiled graph '
        f'--output {out}/steps_512.csv')
    models = [
        (f'models-{size}', f'{COMMAND} bench --settings {size}/{patch} {bench}/cost_gpu_{size}.csv', 200)
        for size, patch in ((224, 16), (32, 4))]
    naflex = f'{COMMAND} bench naflex --device cuda --amp --repeats 9 --force --output {out}/naflex_gpu.csv'
    return {
        'contact': [
            ('first', f'CUDA_LAUNCH_BLOCKING=1 {CHECKS} contact --only bfloat16-14x14', 40),
            ('contact', f'{CHECKS} contact --jobs {JOBS}', 150),
        ],
        'tests': tests,
        'operator': [
            ('graphs', f'{CHECKS} graphs --output {out}/sape2_gpu_graphs.csv', 100), ('operator', operator, 200)],
        'steps': [steps[0], ('profile', f'{CHECKS} profile', 60), ('steps-512', large, 100), *steps[1:]],
        'sanitizer': sanitizer,
        'models': [*models, ('timm', f'{COMMAND} bench timm {bench}/timm_gpu.csv', 100)],
        'naflex': [('naflex', naflex, 60)],
        'tiles': [('tiles', f'{CHECKS} tiles --jobs {JOBS} --output {out}/tiles_gpu.csv', 200)],
        'epoch': [(f'epoch-{model}', train.format(model=model), 100) for model in TRAINED],
        'plans': [
            ('plan-repository', plan.format(name='repository'), 24 * 60 * 60),
            ('images', images, 100),
            ('plan-reference', table, 24 * 60 * 60),
            *((f'plan-{name}', plan.format(name=name), 24 * 60 * 60) for name in ('plan', 'paper'))],
    }


def stop(process, patience=20):
    """End a command that is still running, and what it has started. An experiment ends its trainings first."""
    if process.poll() is not None:
        return
    with suppress(ProcessLookupError):  # as soon as no process of its group is left
        os.killpg(process.pid, signal.SIGTERM)
        end = time.monotonic() + patience
        while time.monotonic() < end:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(.1)
        os.killpg(process.pid, signal.SIGKILL)


def machine():
    """GPU, versions and commit in a line. Ends the program where there is no GPU: tests would interpret the kernels."""
    done = subprocess.run(f'{CHECKS} versions', shell=True, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout, end='')
    if done.returncode:
        sys.exit(f'{done.stderr}\nNo GPU that works: nothing was tried.')
    return done.stdout.splitlines()[0]


def is_done(step, out, where):
    """Whether a step has succeeded before, on the same GPU with the same versions and commit."""
    done = out / f'{step}.ok'
    return done.exists() and where in done.read_text().splitlines()


def run(step, command, out, seconds, where):
    """Whether a step has succeeded, now or before. Its output is in OUT/STEP.log."""
    if is_done(step, out, where):
        print(f'{step:<32} done before')
        return True
    start = time.monotonic()
    with open(out / f'{step}.log', 'w') as log, subprocess.Popen(
            ['bash', '-c', command], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True) as process:
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = 'out of time'
        finally:
            stop(process)
    took = time.monotonic() - start
    print(f'{step:<32} {"ok" if code == 0 else f"FAILED ({code})"}, {took:.0f} s')
    if code == 0:
        (out / f'{step}.ok').write_text(f'{took:.0f} s: {command}\n{where}\n')
    else:
        print('    ' + '\n    '.join((out / f'{step}.log').read_text(errors='replace').splitlines()[-15:]))
    return code == 0


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('out', type=Path, help='folder of the results')
    parser.add_argument('stages', nargs='*', metavar='STAGE')
    parser.add_argument('--minutes', type=float, default=24 * 60, help='stop after so many (default: a day)')
    parser.add_argument('--dry-run', action='store_true', help='print the commands')
    args = parser.parse_intermixed_args()
    out = args.out.resolve()
    every = stages(shlex.quote(str(out)))
    unknown = set(args.stages) - every.keys()
    if unknown:
        parser.error(f'no stage {", ".join(sorted(unknown))}; there are {", ".join(every)}')
    chosen = args.stages or list(every)
    if not (os.environ.get('TIMM_SCRIPTS') and os.environ.get('CIFAR10')):
        wanting = [stage for stage in chosen if stage in ('epoch', 'plans')]
        if wanting and args.stages:
            parser.error(f'{" and ".join(wanting)}: set TIMM_SCRIPTS and CIFAR10')
        for stage in wanting:
            print(f'{stage}: left out, set TIMM_SCRIPTS and CIFAR10')
            chosen.remove(stage)
    out.mkdir(parents=True, exist_ok=True)
    if os.environ.get('WHEELS'):
        site = tempfile.mkdtemp()
        subprocess.run([
            PYTHON, '-m', 'pip', 'install', '-q', '--no-index', '--no-deps', '--target', site,
            *map(str, Path(os.environ['WHEELS']).glob('*.whl'))], check=True)
        os.environ['PYTHONPATH'] = f'{site}:{os.environ["PYTHONPATH"]}'
    end, failed, left = time.monotonic() + 60 * args.minutes, [], []
    where = '' if args.dry_run else machine()
    for stage in chosen:
        for step, command, expected in every[stage]:
            seconds = end - time.monotonic()  # five minutes are worth starting what goes on in the next call
            if args.dry_run:
                print(f'{step}: {command}')
            elif seconds < min(expected, 300) and not is_done(step, out, where):
                left.append(step)
            elif not run(step, command, out, min(seconds, 3 * expected), where):
                failed.append(step)
                if step == 'first':
                    sys.exit('The kernels do not work here: nothing else was tried.')
    if left:
        print(f'Left for the next call: {", ".join(left)}')
    sys.exit(f'Failed: {", ".join(failed)}' if failed else 75 if left else 0)  # 75: EX_TEMPFAIL


if __name__ == '__main__':
    main()
