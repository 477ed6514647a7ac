"""Whether a backup may lie where it is to be kept. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from control_plane.errors import ResidencyMismatch
from control_plane.jurisdiction import within


def require_place(
    place: str | None, laws: Mapping[str, str | None], used: Collection[str], accepts: Collection[str]
) -> None:
    """A backup has the records of all regions, so that each one's law must hold at `place`, or be accepted.

    `laws` are of the regions that the settings have; of others that were `used` nobody knows the law any more. Raises
    ResidencyMismatch.
    """
    gone = sorted(region for region in used if region not in laws and region not in accepts)
    if gone:
        raise ResidencyMismatch(
            f"there are records of {', '.join(gone)}, which the settings don't have any more, so that nobody knows "
            "whose law holds for them: add it to the settings' regions again, or to backup.accepts",
            param="backup.accepts",
        )
    astray = {law for law in laws.values() if law is not None and not within(place, law) and law not in accepts}
    if not astray:
        return
    regions = ", ".join(f"{region} ({law})" for region, law in laws.items() if law in astray)
    if place is None:
        raise ResidencyMismatch(
            f"records of {regions} may not lie just anywhere: backup.jurisdiction must say whose law holds where "
            "backups are kept",
            param="backup.jurisdiction",
        )
    raise ResidencyMismatch(
        f"records of {regions} may not lie in {place}, where backup.jurisdiction says that backups are kept: keep "
        f"them elsewhere, or have {', '.join(sorted(astray))} in backup.accepts if they may",
        param="backup.jurisdiction",
    )
