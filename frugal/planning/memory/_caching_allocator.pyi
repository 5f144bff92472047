from array import array

def replay(
    sizes: array[int],
    events: array[int],
    empties: array[int],
    expandable_segments: bool,
    limit_bytes: int,
    blocks: array[int] | None = None,
    reservation_bytes: int = ...,
) -> tuple[int, int, bool, int, int]: ...
