"""The documents: what is generated is up to date, links lead somewhere, and the code runs."""
import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import matplotlib
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image

import timm_sape
from example_tools import load_script
from test_add_encoding import ENCODING
from timm_sape.analysis.gallery import _lines
from timm_sape.cli import main, make_parser
from timm_sape.encodings.registry.names import _encodings

ROOT = Path(__file__).parent.parent
README = ROOT / 'README.md'
DOCS = sorted((ROOT / 'docs').glob('*.md'))
PAGES = [README, *DOCS]
LINKED = [
    *PAGES, *sorted((ROOT / 'docs' / 'encodings').glob('*.md')), ROOT / 'CHANGELOG.md', ROOT / 'CONTRIBUTING.md',
    *sorted((ROOT / 'results').glob('*.md')), *sorted((ROOT / 'train_configs').glob('*.md')),
    ROOT / 'examples' / 'README.md']
SCRIPTS = "timm's scripts and a folder of images"  # what a block needs that .ci/full runs


def name_of(path):
    return str(path.relative_to(ROOT))


def pages_but_long(long):
    """All pages as parameters of a test; for the one named `long` it is in .ci/full."""
    return [pytest.param(path, marks=pytest.mark.full if name_of(path) == long else []) for path in PAGES]


@pytest.fixture(scope='module')
def make_pages():
    return load_script(ROOT / 'docs' / 'make_pages.py')


def blocks(path, language):
    """Blocks of code as (code, what it needs), the latter from a comment in the line before, or ''."""
    found = re.findall(
        rf'(?:<!-- needs: (.*?) -->\n)?^( *)```{language}\n(.*?)^ *```', path.read_text(), re.DOTALL | re.MULTILINE)
    return [(textwrap.dedent(code), needs) for needs, _, code in found]


def commands(code):
    """The commands of a shell block, as lists of words."""
    lines = code.replace('\\\n', ' ').splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def slugs(path):
    """The anchors that GitHub gives the headings of a page."""
    text = re.sub(r'^```.*?^```', '', path.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r'^#+ (.*)$', text, flags=re.MULTILINE)
    return {re.sub(r'[^\w\- ]', '', title.lower()).replace(' ', '-') for title in titles}


def test_generated_parts_are_up_to_date(make_pages):
    stale = [name_of(path) for path, text in make_pages.pages().items() if path.read_text() != text]
    assert not stale, f'run `python docs/make_pages.py`: {stale}'


@pytest.mark.parametrize('old, new, message', [
    ('\n\nEach head of each layer learns', ' Each head learns', 'a docstring of its file, with the source'),
    ('    """A learned window.\n\n    Logits get -w_h^2 (dy^2 + dx^2).\n\n', '    """A learned window.\n\n',
     'an equation in the docstring of its class'),
    ('        start: Initial value of w.\n', '', 'a line below `Args:` for start'),
    ('', '', None),
], ids=['file', 'equation', 'keyword', 'nothing'])
def test_docstring_of_an_encoding_that_lacks(old, new, message, make_pages, own_registry, monkeypatch):
    assert old in ENCODING
    module = types.ModuleType('window2d')
    monkeypatch.setitem(sys.modules, 'window2d', module)
    exec(ENCODING.replace(old, new).replace('from .', 'from timm_sape.encodings.'), vars(module))
    if message:
        with pytest.raises(ValueError, match=re.escape(f"The page of 'window2d' needs {message}")):
            make_pages.page('window2d')
    else:
        page = make_pages.page('window2d')
        assert 'It is not in [the table of costs]' in page and '| `start` | `0.3` | Initial value of w. |' in page


def test_each_encoding_has_a_page_and_a_picture():
    folder = ROOT / 'docs' / 'encodings'
    for suffix in ('.md', '.png'):
        assert sorted(path.stem for path in folder.glob(f'*{suffix}')) == timm_sape.list_encodings()
    assert (ROOT / 'docs' / 'gallery.png').stat().st_size < 300_000


def test_lines_of_the_gallery():
    """No panel stands alone in the last line."""
    lengths = {n: [len(line) for line in _lines(range(n))] for n in (1, 12, 13, 25)}
    assert lengths == {1: [1], 12: [12], 13: [7, 6], 25: [9, 9, 7]}


def test_pages_name_models_that_exist():
    names = {
        name for path in (ROOT / 'docs' / 'encodings').glob('*.md')
        for name in re.findall(r'\b(?:naflex|test_)?vit_(?:tiny|small|base)_\w+', path.read_text())}
    assert 'vit_small_rope2d_ape' in names and names <= set(timm.list_models())


@pytest.mark.full
def test_site(tmp_path):
    """Strictly: any wrong link or anchor, or a docstring that names what is not there, is an error."""
    command = [sys.executable, ROOT / 'docs' / 'build_site.py', tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, 'NO_MKDOCS_2_WARNING': '1'})
    assert done.returncode == 0, done.stderr
    api = (tmp_path / 'api.html').read_text()
    names = [*timm_sape.__all__, 'functional.sape2_attention', 'hub.load']
    missing = [name for name in names if name not in ('functional', 'hub') and f'id="timm_sape.{name}"' not in api]
    assert not missing and (tmp_path / 'docs' / 'encodings' / 'sape2_k.html').exists()


@pytest.mark.full
def test_site_notices_wrong_links(tmp_path):
    """The negative control."""
    for name in ('docs', 'timm_sape'):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns('__pycache__'))
    for name in ('README.md', 'CHANGELOG.md', 'CONTRIBUTING.md', 'results', 'train_configs', 'examples', '.ci'):
        (tmp_path / name).symlink_to(ROOT / name)
    page = tmp_path / 'docs' / 'gallery.md'
    page.write_text(page.read_text() + '\n[nowhere](encodings.md#nowhere)\n')
    command = [sys.executable, tmp_path / 'docs' / 'build_site.py', tmp_path / 'site']
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "does not contain an anchor '#nowhere'" in done.stderr


def test_readme_is_short():
    lines = README.read_text().splitlines()
    assert len(lines) <= 200 and any(line.startswith('![') for line in lines[:25])


@pytest.mark.parametrize('path', LINKED, ids=name_of)
def test_links_lead_somewhere(path):
    text = re.sub(r'^ *```.*?^ *```', '', path.read_text(), flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r'\]\(([^()\s]+)\)', re.sub(r'`[^`]*`', '``', text))
    assert targets or path not in PAGES
    for target in targets:
        file, _, anchor = target.partition('#')
        if file.startswith(('http://', 'https://')):
            continue
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), target
        if anchor:
            assert anchor in slugs(found), target


@pytest.fixture
def images(tmp_path, monkeypatch):
    """A working folder with cat.jpg and a folder of images, as the documents name them."""
    monkeypatch.chdir(tmp_path)
    for split in ('train', 'val'):
        for label, colour in (('cat', 'red'), ('dog', 'blue')):
            folder = tmp_path / 'DATA' / split / label
            folder.mkdir(parents=True)
            for i in range(4):
                gradient = Image.linear_gradient('L').convert('RGB').resize((32 + 8 * i, 32))
                plain = Image.new('RGB', gradient.size, colour)
                Image.blend(gradient, plain, 0.5).save(folder / f'{i}.png')
                plain.save(folder / f'{i + 4}.png')
    Image.linear_gradient('L').convert('RGB').save(tmp_path / 'cat.jpg')
    return tmp_path


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
    """A checkpoint as train.py leaves it, trained once for all pages."""
    torch.manual_seed(0)
    kwargs = {'img_size': 32, 'patch_size': 4, 'depth': 2}
    model = timm.create_model('vit_tiny_rope2d', num_classes=2, **kwargs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(10):  # until it tells the colours of cats from those of dogs, as `adapt` wants labels to fit
        red, blue = 2 * torch.rand(2, 8, 1, 1, 1) - 1
        pixels = torch.cat([red, torch.zeros(8, 1, 1, 1), blue], dim=1).expand(-1, -1, 32, 32)
        loss = F.cross_entropy(model(pixels), (blue > red).flatten().long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    args = argparse.Namespace(num_classes=2, model_kwargs=kwargs)
    path = tmp_path_factory.mktemp('trained') / 'checkpoint.pth.tar'
    torch.save({'arch': 'vit_tiny_rope2d', 'state_dict': model.state_dict(), 'args': args}, path)
    return path


@pytest.fixture
def checkpoints(images, checkpoint):
    """Also checkpoints, where the README's block for training leaves them."""
    for name in ('first/last', 'second/model_best'):
        path = images / 'output' / f'{name}.pth.tar'
        path.parent.mkdir(parents=True)
        shutil.copy(checkpoint, path)


@pytest.mark.parametrize('path', pages_but_long('docs/grafting.md'), ids=name_of)
def test_python_runs(path, tmp_path, monkeypatch):
    """All of it, but with random weights where it would download some. Blocks of a page follow each other."""
    monkeypatch.chdir(tmp_path)
    known, scope = set(timm_sape.list_encodings()), {}
    try:
        for code, needs in blocks(path, 'python'):
            if not needs:
                lines = [
                    line if 'local-dir' in line else line.replace('pretrained=True', 'pretrained=False')
                    for line in code.splitlines()]
                exec('\n'.join(lines), scope)
        if path == README:
            check_readme(scope, tmp_path)
    finally:
        for name in set(timm_sape.list_encodings()) - known:
            del _encodings[name]


def check_readme(scope, folder):
    """What its blocks have left behind is what it says."""
    assert len(blocks(README, 'python')) == 5 and len(blocks(README, 'bash')) == 5
    timm, torch = scope['timm'], scope['torch']
    model = scope['model']
    assert model.pos_enc == 'ape+my_encoding'
    slopes = [p for name, p in model.named_parameters() if name.endswith('my_encoding.slope')]
    assert [p.shape for p in slopes] == [(6, 1, 1)] * 12 and all((p == 0.2).all() for p in slopes)
    small = timm.create_model('test_vit_pos_enc', pos_enc='ape+my_encoding', global_pool='avg')
    logits = small(torch.randn(1, 3, 160, 160))
    assert logits.shape == (1, 1000)
    logits.square().sum().backward()
    assert all(p.grad.abs().min() > 0 for name, p in small.named_parameters() if 'slope' in name)
    kept = small.forward_features(torch.randn(1, 3, 160, 160), keep_indices=torch.arange(4)[None])
    assert kept.shape == (1, 5, 64)
    saved = timm.create_model(f'local-dir:{folder}/my_model', pretrained=True)
    assert saved.pos_enc == 'ape+auto_rope2d' and saved.num_classes == 10 and scope['logits'].shape == (1, 1000)


@pytest.mark.parametrize('path', pages_but_long('docs/analysis.md'), ids=name_of)
def test_commands_run(path, checkpoints, monkeypatch):
    """Those of blocks that need nothing special. Of the others at least our own options exist."""
    monkeypatch.setitem(matplotlib.rcParams, 'savefig.dpi', 50)
    variables = {}
    for code, needs in blocks(path, 'bash'):
        for words in commands(code):
            if needs:
                if words[0] == 'timm-sape':
                    make_parser().parse_args(words[1:])
                continue
            name, is_set, value = words[0].partition('=')
            if is_set:
                variables[f'${name}'] = value
                continue
            words = [variables.get(word, word) for word in words]
            assert words[0] == 'timm-sape', f'mark the block with <!-- needs: ... -->: {words}'
            assert main(words[1:]) == 0, words


@pytest.mark.skipif('TIMM_SCRIPTS' not in os.environ, reason="needs timm's scripts, see .ci/full")
@pytest.mark.parametrize('path', [README, ROOT / 'docs' / 'training.md'], ids=name_of)
def test_scripts_run(path, images):
    """The blocks that train and validate on a folder of images, as printed, but for cloning timm."""
    (images / 'pytorch-image-models').symlink_to(Path(os.environ['TIMM_SCRIPTS']).resolve())
    codes = [code for code, needs in blocks(path, 'bash') if needs == SCRIPTS]
    assert codes
    bin_folder = images / 'bin'
    bin_folder.mkdir()
    (bin_folder / 'timm-sape').write_text(f'#!/bin/sh\nexec {sys.executable} -m timm_sape "$@"\n')
    (bin_folder / 'timm-sape').chmod(0o755)
    env = {
        **os.environ, 'PATH': f'{bin_folder}{os.pathsep}{os.environ["PATH"]}',
        'PYTHONPATH': os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])}
    for code in codes:
        code = re.sub(r'^git clone .*\n', '', code, flags=re.MULTILINE)
        done = subprocess.run(['bash', '-e', '-c', code], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        assert 'output' in code and list(images.glob('output/*/model_best.pth.tar'))
