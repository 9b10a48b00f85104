"""The page that `--report FILE.html` writes: collecting while a job runs, drawing, and HTML.

recorder.py   what the job calls; renews the page           timeline.py: one sweep, in bounded memory
base.py       what a recorder reads of a job; the recorder of a job without a page
record.py     everything that a page shows, as plain values
figures.py    record -> matplotlib figures -> inline SVG in the page's colors
page.py       record -> HTML, with page.html
"""
