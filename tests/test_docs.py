"""The reference pages are what the code says today."""

from pathlib import Path

import pytest

from agrpo.config.reference import PAGES

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("page", PAGES)
def test_page_is_current(page):
    assert (DOCS / page).read_text() == PAGES[page](), "run: python -m agrpo.config.reference docs"
