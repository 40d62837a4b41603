"""The page: findings, graph and the history of every layer in one HTML file."""

from lightning_recorder.page.data import page_data
from lightning_recorder.page.html import page_html
from lightning_recorder.page.summary import page_document, summary_html

__all__ = ["page_data", "page_document", "page_html", "summary_html"]
