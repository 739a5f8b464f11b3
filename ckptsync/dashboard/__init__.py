"""A page to look at: versions by attempt, who serves what, how loads went, and which layers changed. It only reads.

`board` gathers what the page shows, `page` is the page as one file, `server` answers for it over HTTP.
"""
