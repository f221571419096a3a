"""What takes longer than a commit may, in stages: `.ci/full [STAGE ...]`, by default all. Writes .ci/full-result.md.

Each stage writes a section of that file, with its date, commit and result, and leaves the others as they are. So a
stage that was interrupted is run again by itself. One that fails does not stop the others.

Environment: TIMM_SCRIPTS is a folder with timm's train.py, validate.py and onnx_export.py, CIFAR10_SMALL an ImageFolder
of CIFAR-10 with train/ and test/ (2,000 and 500 images, balanced).
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / '.ci' / 'full-result.md'
PYTHON = ROOT / '.venv' / 'bin' / 'python'
STAGES = {
    'run': 'bash .ci/run',
    'long tests': f'{PYTHON} -m pytest -q -n auto --full -m full',
    'kernels': f'{PYTHON} .ci/check_spills.py && {PYTHON} .ci/check_spills.py --quick --arch 86',
    'naflex parity': f'{PYTHON} .ci/naflex_parity.py > /dev/null',
    'naflex grafts': f'{PYTHON} .ci/naflex_grafts.py > /dev/null',
    'fuzzer': f'{PYTHON} .ci/fuzz.py --inputs 10000',
    'scripts': f'{PYTHON} -m pytest -q -n auto .ci/test_timm_scripts.py .ci/test_naflex_scripts.py',
    'tests of each encoding': f'{PYTHON} .ci/count_tests.py',
}
NEEDED = ('TIMM_SCRIPTS', 'CIFAR10_SMALL')  # without them tests are skipped
KEPT = re.compile(  # lines of a log that go into the section
    r'=+ .*(passed|failed)|\d+ (passed|failed)|\+ |  (in torch|Hub\))|input \d+,|FAILED |\||'
    r'.*(inputs, seed|were refused|kernels, )')
TABLES = {  # of the stage 'scripts', whose tests write a row each
    'rows': 'train.py with the recipe `smoke` (10 epochs, 2,000 training and 500 test images of CIFAR-10, seed 42):',
    'naflex_rows': 'train.py with `--naflex-loader` (8 epochs of the same images, cropped and enlarged to many shapes; '
                   'sequences of\n36, 64 and 100 patches, seed 42):',
}


def output_of(command):
    return subprocess.run(command, shell=True, cwd=ROOT, text=True, capture_output=True, check=True).stdout.strip()


def run(stage, commit):
    """Run a stage of a commit. Returns its section, and whether it passed."""
    for name in TABLES:
        shutil.rmtree(ROOT / '.ci' / name, ignore_errors=True)
    began, start = datetime.now(timezone.utc), time.monotonic()
    lines = []
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with subprocess.Popen(STAGES[stage], shell=True, cwd=ROOT, text=True, **pipes) as process:
        for line in process.stdout:
            print(line, end='', flush=True)
            if KEPT.match(line):
                lines.append(re.sub(r'/tmp/[^ ]*/', '', line.rstrip()))
    versions = output_of(f"{PYTHON} -c 'import sys, timm, torch; print("
                         'f"Python {sys.version.split()[0]}, torch {torch.__version__}, timm {timm.__version__}")\'')
    passed, minutes = process.returncode == 0, (time.monotonic() - start) / 60
    text = (
        f'{"Passed" if passed else "FAILED"}: {began:%Y-%m-%d %H:%M} UTC, {minutes:.0f} minutes, commit {commit}, '
        f'{versions}, {os.cpu_count()} CPU cores.\n')
    if lines:
        text += '\n' + '\n'.join(lines if lines[0].startswith('|') else ['```', *lines, '```']) + '\n'
    if stage == 'scripts':  # timm's wheel has no scripts, so they may be of another version
        blob = output_of('git hash-object "$TIMM_SCRIPTS/train.py"')
        text += f"\nGit's name of the train.py that ran: blob {blob[:12]}.\n"
    for name, about in TABLES.items():
        rows = sorted((ROOT / '.ci' / name).glob('*'))
        if rows:
            text += f'\n{about}\n\n| model | first loss | last loss | ratio | top-1 |\n|---|---|---|---|---|\n'
            text += ''.join(row.read_text() for row in rows)
        shutil.rmtree(ROOT / '.ci' / name, ignore_errors=True)
    return text, passed


def write(stage, section):
    """Replace the section of a stage."""
    before = RESULT.read_text() if RESULT.exists() else ''
    found = re.findall(r'^## (.*)\n\n([\s\S]*?)(?=^## |\Z)', before, re.MULTILINE)
    sections = {**{title: text.strip() for title, text in found}, stage: section.strip()}
    text = '\n\n'.join(f'## {title}\n\n{sections[title]}' for title in STAGES if title in sections)
    RESULT.write_text(f'# Last run of .ci/full\n\nEach stage as it last ran.\n\n{text}\n')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('stages', nargs='*', metavar='STAGE', help=', '.join(map(repr, STAGES)))
    args = parser.parse_args()
    unknown = [stage for stage in args.stages if stage not in STAGES]
    if unknown:
        parser.error(f'no stage {unknown[0]!r}; there are {", ".join(map(repr, STAGES))}')
    missing = [name for name in NEEDED if name not in os.environ]
    if missing:
        parser.error(f'set {" and ".join(missing)}: see --help')
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    if not PYTHON.exists():
        subprocess.run([sys.executable, '-m', 'venv', ROOT / '.venv'], check=True)
    subprocess.run([PYTHON, '-m', 'pip', 'install', '-q', '-e', '.[test]'], cwd=ROOT, check=True)
    failed = []
    # before results are written, which make the tree dirty
    commit = output_of(f"{PYTHON} -c 'from timm_sape.lab.machine import commit; print(commit())'")
    for stage in args.stages or STAGES:
        print(f'+ {stage}: {STAGES[stage]}', flush=True)
        section, passed = run(stage, commit)
        write(stage, section)
        failed += [] if passed else [stage]
    if failed:
        sys.exit(f'failed: {", ".join(failed)}')


if __name__ == '__main__':
    main()
