"""What the server tells of itself: live view, residency, reports, lists, page.

In: reports of engines. Out: JSON and server-sent events.
"""
