"""The operator's web page: static files that speak to the admin API with the operator's own token."""

from control_plane.dashboard.pages import add_pages

__all__ = ["add_pages"]
