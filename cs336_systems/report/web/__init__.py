"""The report as an HTML page, its charts as SVG, and the memory timeline page."""
