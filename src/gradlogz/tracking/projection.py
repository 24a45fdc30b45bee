"""Local map projection of latitude and longitude: metres east and north of an origin.

    (e, n, u)   position in the tangent frame of the WGS84 ellipsoid at the origin
    r           = |(e, n)|,  c = atan(r / (R + u)),  R = sqrt(M N)          R: radius of Gaussian curvature
    (x, y)      = R c (e, n) / r

Distances from the origin are right (azimuthal equidistant). Elsewhere lengths across the direction to the origin are
too long by c²/6: 0.1 % at 500 km, 0.4 % at 1000 km.

Read next: detections.py, which projects them.
"""

import math
from typing import NamedTuple

import torch

from .._typing import Float, Tensor

SEMI_MAJOR, FLATTENING = 6378137.0, 1 / 298.257223563  # WGS84, metres
ECCENTRICITY = FLATTENING * (2 - FLATTENING)  # squared
STEP = 100.0  # metres, of the difference that turns a course
ITERATIONS = 8  # of the inverse; each gains three digits or more within 2000 km


class LocalPlane(NamedTuple):
    """Projection around an origin in degrees."""

    latitude: float
    longitude: float

    @classmethod
    def of(cls, latitude: Float[Tensor, "n"], longitude: Float[Tensor, "n"]) -> "LocalPlane":
        """The plane around the median position; longitudes may cross the 180th meridian."""
        known = latitude.isfinite() & longitude.isfinite()
        if not bool(known.any()):
            return cls(0.0, 0.0)
        first = float(longitude[known][0])
        turned = torch.remainder(longitude[known] - first + 180, 360) - 180
        return cls(float(latitude[known].median()), first + float(turned.median()))

    def project(self, latitude: Float[Tensor, "*n"], longitude: Float[Tensor, "*n"]) -> Float[Tensor, "*n xy"]:
        """Metres east and north of the origin."""
        phi, lam = latitude.deg2rad(), (longitude - self.longitude).deg2rad()
        phi_0 = math.radians(self.latitude)
        N, (M_0, N_0) = _radii(phi)[1], _radii(torch.tensor(phi_0, dtype=torch.float64))
        across, along = N * phi.cos() * lam.cos(), N * (1 - ECCENTRICITY) * phi.sin()
        e = N * phi.cos() * lam.sin()
        out, up = across - N_0 * math.cos(phi_0), along - N_0 * (1 - ECCENTRICITY) * math.sin(phi_0)
        n = up * math.cos(phi_0) - out * math.sin(phi_0)
        u = out * math.cos(phi_0) + up * math.sin(phi_0)
        R, r = (M_0 * N_0).sqrt(), torch.hypot(e, n)
        scale = torch.where(r > 0, R * torch.atan2(r, R + u) / r.clamp(min=1e-300), 1.0)
        return torch.stack((scale * e, scale * n), -1)

    def locate(self, xy: Float[Tensor, "*n xy"]) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n"]]:
        """Latitude and longitude in degrees, by Newton's method with the metric of the ellipsoid."""
        latitude = torch.full_like(xy[..., 0], self.latitude)
        longitude = torch.full_like(xy[..., 0], self.longitude)
        for _ in range(ITERATIONS):
            east, north = (xy - self.project(latitude, longitude)).unbind(-1)
            M, N = _radii(latitude.deg2rad())
            turn = (longitude - self.longitude).deg2rad() * latitude.deg2rad().sin()  # convergence of meridians
            east, north = east * turn.cos() + north * turn.sin(), north * turn.cos() - east * turn.sin()
            latitude = (latitude + (north / M).rad2deg()).clamp(-90, 90)
            longitude = longitude + (east / (N * latitude.deg2rad().cos().clamp(min=1e-6))).rad2deg()
        return latitude, torch.remainder(longitude + 180, 360) - 180

    def turned(self, course: Float[Tensor, "*n xy"], xy: Float[Tensor, "*n xy"]) -> Float[Tensor, "*n xy"]:
        """Displacement on the plane, at the place xy, of one metre east and north on the ellipsoid."""
        latitude, longitude = self.locate(xy)
        M, N = _radii(latitude.deg2rad())
        east, north = course.unbind(-1)
        ahead = [
            self.project(
                latitude + (sign * STEP * north / M).rad2deg(),
                longitude + (sign * STEP * east / (N * latitude.deg2rad().cos())).rad2deg(),
            )
            for sign in (1, -1)
        ]
        return (ahead[0] - ahead[1]) / (2 * STEP)


def _radii(phi: Tensor) -> tuple[Tensor, Tensor]:
    """Radii of curvature of the meridian, M, and of the prime vertical, N."""
    w = 1 - ECCENTRICITY * phi.sin().square()
    return SEMI_MAJOR * (1 - ECCENTRICITY) / w**1.5, SEMI_MAJOR / w.sqrt()
