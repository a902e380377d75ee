"""The recipes' Python, importable as `agrpo.recipes.<name>.<module>` from any folder.

A module with a `__path__` is a package: its parts lie in `recipes/` of a checkout, or in `agrpo/recipes/` of a wheel.
"""

from pathlib import Path

_FOLDERS = (Path(__file__).parent / "recipes", Path(__file__).parents[1] / "recipes")
__path__ = [str(folder) for folder in _FOLDERS if folder.is_dir()]
