"""The page: findings, graph and the history of every layer in one HTML file."""

from lightning_recorder.page.data import PAGE_FORMAT, page_data
from lightning_recorder.page.html import page_html

__all__ = ["PAGE_FORMAT", "page_data", "page_html"]
