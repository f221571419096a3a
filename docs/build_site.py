"""Build README, docs, recipes and results as a static site, with a reference of the API from the docstrings.

    pip install -e '.[docs]'
    python docs/build_site.py FOLDER

The build is strict: a link, an anchor or a docstring that is wrong ends it. The pages keep their places, so that links
between them are the same as in the repository.
"""
import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    'README.md', 'CHANGELOG.md', 'CONTRIBUTING.md', 'CITATION.cff', 'LICENSE', 'docs/*.md', 'docs/*.png', 'docs/*.css',
    'docs/encodings/*', 'results/**/*', 'train_configs/**/*', 'examples/*', '.ci/*.md']
API = {
    'Models': ['timm_sape.VisionTransformerPosEnc', 'timm_sape.NaFlexVitPosEnc'],
    'Pretrained weights': ['timm_sape.graft'],
    'Registry': [
        'timm_sape.list_encodings', 'timm_sape.get_encoding', 'timm_sape.encoding_keywords',
        'timm_sape.register_encoding', 'timm_sape.create_encoding'],
    'Encodings': [
        'timm_sape.Grid', 'timm_sape.PositionEncoding', 'timm_sape.FixedEncoding', 'timm_sape.CoordinateEncoding',
        'timm_sape.ResizedEncoding', 'timm_sape.ReferenceGridEncoding', 'timm_sape.RotaryEncoding',
        'timm_sape.FixedRotaryEncoding', 'timm_sape.FrequencyEncoding', 'timm_sape.BlockRotaryEncoding',
        'timm_sape.OffsetBiasEncoding'],
    'SaPE2 as functions': ['timm_sape.functional.sape2_attention', 'timm_sape.functional.sape2_bias'],
    'Saving and the Hub': ['timm_sape.hub.save', 'timm_sape.hub.load', 'timm_sape.hub.push'],
    'Analysis': [
        'timm_sape.analysis.position_maps', 'timm_sape.analysis.similarity', 'timm_sape.analysis.position_shap',
        'timm_sape.analysis.probe'],
    'Loading models and images': [
        'timm_sape.loading.load_model', 'timm_sape.loading.open_dataset', 'timm_sape.loading.preprocessing'],
}


def collect(folder: Path) -> None:
    """Copy the pages and what they link to, and write the page of the API."""
    for pattern in PAGES:
        for path in ROOT.glob(pattern):
            if path.is_file() and '__pycache__' not in path.parts:
                target = folder / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
    sections = [
        f'## {title}\n\n' + '\n\n'.join(f'::: {name}' for name in names) for title, names in API.items()]
    (folder / 'api.md').write_text('# API\n\n' + '\n\n'.join(sections) + '\n')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=Path, help='the site; it is emptied first')
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        collect(Path(work) / 'pages')
        shutil.copy(ROOT / 'docs' / 'mkdocs.yml', work)
        command = ['-m', 'mkdocs', 'build', '--strict', '-f', f'{work}/mkdocs.yml', '-d', str(args.folder.resolve())]
        return subprocess.run([sys.executable, *command], cwd=ROOT).returncode


if __name__ == '__main__':
    sys.exit(main())
