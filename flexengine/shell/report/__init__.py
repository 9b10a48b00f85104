"""The page that `--report FILE.html` writes: collecting while a job runs, drawing, and HTML.

recorder.py   what the job calls; renews the page
record.py     everything that a page shows, as plain values, in bounded memory
page.py       record -> pictures as inline SVG, and HTML with page.html
"""
