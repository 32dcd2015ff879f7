"""DDCL as a clustering estimator on scikit-learn's public base classes."""

import math
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thalweg.errors import InputError, MissingExtraError
from thalweg.geometry.checks import one_point
from thalweg.growth.prototypes import Panel, collapse_panel
from thalweg.ops.prototypes import Assigned, assign, critical_temperature, kmeans_plus_plus, largest_variance

try:
    from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, ClusterMixin, TransformerMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError:
    raise MissingExtraError("scikit-learn, which growth.DDCL is built on,", "growth") from None

OBJECTIVES = ("loss", "free_energy")
HALVINGS = 30  # of a step that does not descend, before the search ends


class DDCL(ClassNamePrefixFeaturesOutMixin, TransformerMixin, ClusterMixin, BaseEstimator):
    """Soft prototype clustering: L_q = mean over samples of sum_k q_k |x - p_k|^2, q = softmax_k(-|x - p_k|^2 / tau), by full-batch descent.

    n_clusters: K. objective: ``loss``, L_q with the gradient through the assignment, under which a prototype much farther than average is
    repelled; ``free_energy``, which the detached rule (soft k-means) descends exactly. temperature: tau, in the units of a squared
    distance; ``"auto"``: lambda_max of the covariance, a quarter of the critical temperature of the loss and half that of the free energy,
    above which prototypes that start together never part. learn_temperature: log tau descends too, by ``temperature_rate`` per step at
    most; under either objective it can only cool. init: ``"k-means++"``, or an array [n_clusters n_features]. dual: prototypes are P = A X,
    on centred samples, with A [n_clusters n_samples] learned, the dual layer of the deep competitive networks. n_init: starts, of which the
    best end is kept. tol: relative fall of the objective below which descent ends. max_iter: steps. random_state: as everywhere in
    scikit-learn.

    Every step divides the gradient of a prototype by its usage (step 1 of the detached rule is then the soft k-means update) and is halved
    until the objective falls, so ``objective_path_`` never rises. Computation in float64.

    Attributes: cluster_centers_ [n_clusters n_features]; temperature_; critical_temperature_; labels_; n_iter_; objective_path_; loss_, fit_,
    variance_ (loss_ = fit_ + variance_); panel_, the :class:`thalweg.growth.Panel` on the training data.
    Raises: InputError (a ValueError), one line. Reconstructed from the abstracts of Cirrincione 2026 (arXiv 2604.01740) and the public code
    of its forerunner (arXiv 2008.09477); the texts were not available. Ours: objective and optimiser, k-means++ start, automatic temperature.
    """

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        objective: str = "loss",
        temperature: Any = "auto",
        learn_temperature: bool = False,
        temperature_rate: float = 0.05,
        init: Any = "k-means++",
        dual: bool = False,
        n_init: int = 4,
        max_iter: int = 300,
        tol: float = 1e-6,
        random_state: Any = None,
    ):
        self.n_clusters = n_clusters
        self.objective = objective
        self.temperature = temperature
        self.learn_temperature = learn_temperature
        self.temperature_rate = temperature_rate
        self.init = init
        self.dual = dual
        self.n_init = n_init
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state

    def fit(self, X, y=None):
        """Learn the prototypes of X [n_samples n_features]; y is ignored. Raises: InputError."""
        self._check()
        data = torch.from_numpy(np.array(self._data(X, reset=True)))
        x = data.double()
        if len(x) < self.n_clusters:
            raise InputError(
                f"{self.n_clusters} prototypes need as many samples, got n_samples={len(x)}; lower n_clusters or give more data"
            )
        shift = x.mean(0)  # distances do not see it, and their digits are kept
        _check_squares(x, shift, "X")
        if one_point(data):
            raise InputError(
                f"all {len(x)} samples are the same point (up to rounding), which has no clusters; give data that differ"
            )
        x = x - shift
        if largest_variance(x) < torch.finfo(x.dtype).tiny:
            raise InputError(
                f"squared distances between these samples vanish in float64 (they are at most {x.abs().max():.2g} from their mean); "
                "multiply X by a number that brings it near 1"
            )
        tau = self._temperature(x)
        given = not isinstance(self.init, str)
        generator = torch.Generator().manual_seed(int(check_random_state(self.random_state).randint(2**31 - 1)))
        best = None
        for _ in range(1 if given else self.n_init):
            end = self._descend(x, self._start(x, shift, generator), tau)
            best = end if best is None or end["path"][-1] < best["path"][-1] else best
        assert best is not None
        found = assign(x, best["points"], best["tau"])
        self.cluster_centers_ = (best["points"] + shift).numpy()
        self.temperature_ = best["tau"]
        self.critical_temperature_ = critical_temperature(x, gradient=self._gradient).item()
        self.labels_ = found.weights.argmax(-1).numpy().astype(np.int64)
        self.objective_path_ = np.asarray(best["path"])
        self.n_iter_ = len(best["path"]) - 1
        self.fit_, self.variance_ = found.fit.mean().item(), found.variance.mean().item()
        self.loss_ = self.fit_ + self.variance_
        self.panel_: Panel = collapse_panel(x, best["points"], best["tau"], gradient=self._gradient)
        self._n_features_out = self.n_clusters
        return self

    def predict(self, X) -> np.ndarray:
        """The prototype with the largest weight (the nearest) for each sample [n_samples]."""
        return self._assign(X).weights.argmax(-1).numpy().astype(np.int64)

    def transform(self, X) -> np.ndarray:
        """The assignment q [n_samples n_clusters]: rows sum to one."""
        return self._assign(X).weights.numpy()

    def reconstruct(self, X) -> np.ndarray:
        """x^ = sum_k q_k p_k [n_samples n_features]."""
        return self._assign(X).reconstruction.numpy()

    def score(self, X, y=None) -> float:
        """Minus the loss L_q on X: larger is better."""
        return -self._assign(X).loss.mean().item()

    @property
    def _gradient(self):
        return "through" if self.objective == "loss" else "detached"

    def _assign(self, X) -> Assigned:
        check_is_fitted(self)
        x = torch.from_numpy(np.array(self._data(X, reset=False), dtype=np.float64))
        centres = torch.from_numpy(self.cluster_centers_)
        _check_squares(x, centres.mean(0), "X")
        return assign(x, centres, self.temperature_)

    def _data(self, X, *, reset: bool) -> np.ndarray:
        return np.asarray(validate_data(self, X, reset=reset, dtype=[np.float64, np.float32]))

    def _check(self) -> None:
        for name, least in (("n_clusters", 1), ("n_init", 1), ("max_iter", 1)):
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
                raise InputError(f"{name} must be a whole number of at least {least}, got {value!r}")
        for name in ("tol", "temperature_rate"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not 0 <= float(value) < math.inf:
                raise InputError(f"{name} must be finite and not negative, got {value!r}")
        for name in ("learn_temperature", "dual"):
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise InputError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.objective not in OBJECTIVES:
            raise InputError(f"objective must be {' or '.join(OBJECTIVES)}, got {self.objective!r}")
        if isinstance(self.init, str) and self.init != "k-means++":
            raise InputError(f"init must be 'k-means++' or an array [n_clusters n_features], got {self.init!r}")
        automatic = isinstance(self.temperature, str) and self.temperature == "auto"
        if not automatic and not (isinstance(self.temperature, Real) and 0 < float(self.temperature) < math.inf):
            raise InputError(f"temperature must be 'auto' or a positive number, got {self.temperature!r}")

    def _temperature(self, x: Tensor) -> float:
        return largest_variance(x).item() if self.temperature == "auto" else float(self.temperature)

    def _start(self, x: Tensor, shift: Tensor, generator: torch.Generator) -> Tensor:
        if isinstance(self.init, str):
            return kmeans_plus_plus(x, self.n_clusters, generator)
        try:
            array = np.asarray(self.init)
        except (RuntimeError, TypeError, ValueError):  # rows of several lengths, a tensor with a gradient
            array = np.asarray(None)
        if array.dtype.kind not in "fiu":
            raise InputError(
                f"init must be 'k-means++' or an array [n_clusters n_features] of real numbers, got {type(self.init).__name__} "
                f"of {array.dtype}"
            )
        given = torch.from_numpy(array.astype(np.float64))
        if given.shape != (self.n_clusters, x.shape[1]) or not torch.isfinite(given).all():
            raise InputError(
                f"init must be finite and [n_clusters n_features] = [{self.n_clusters} {x.shape[1]}], got {list(given.shape)}"
            )
        _check_squares(given, shift, "init")
        return given - shift

    def _descend(self, x: Tensor, points: Tensor, tau: float) -> dict[str, Any]:
        """Preconditioned descent from ``points`` with step halving; temperature steps in between, when it is learned."""
        # The dual layer: P = A X moves within the span of the samples, by the gradient of A, which is that of P times X X^T.
        gram = x.T @ x / len(x) if self.dual else None
        scale = largest_variance(x).item()
        if gram is not None:
            points = _onto_rows(points, x)
        value, path, rate = self._value(x, points, tau), [], 1.0
        path.append(value)
        for _ in range(self.max_iter):
            direction = self._direction(x, points, tau)
            if gram is not None:
                direction = direction @ gram / scale
            rate, moved = min(1.0, 2 * rate), False
            for _ in range(HALVINGS):
                candidate = points - rate * direction
                new = self._value(x, candidate, tau)
                if new < value:
                    points, moved = candidate, True
                    break
                rate /= 2
            fall = value - new if moved else 0.0
            value = new if moved else value
            if self.learn_temperature:
                tau, value, cooled = self._cool(x, points, tau, value)
                fall += cooled
            path.append(value)
            if fall <= self.tol * abs(value):
                break
        return {"points": points, "tau": tau, "path": path}

    def _value(self, x: Tensor, points: Tensor, tau: float) -> float:
        found = assign(x, points, tau)
        per = found.loss if self.objective == "loss" else found.free_energy(tau, normalised=True)
        return per.mean().item()

    def _direction(self, x: Tensor, points: Tensor, tau: float) -> Tensor:
        """Gradient with respect to each prototype over twice its usage: sum_n w_nk (p_k - x_n) / sum_n q_nk."""
        found = assign(x, points, tau)
        weights = found.weights
        if self.objective == "loss":  # through the assignment: w = q [1 - (d_k - d) / tau]
            distances = torch.cdist(x, points).square()
            mean = (weights * distances).sum(-1, keepdim=True)
            weights = weights * (1 - (distances - mean) / tau)
        used = found.weights.sum(0).clamp(min=torch.finfo(x.dtype).tiny)[:, None]
        return (weights.sum(0)[:, None] * points - weights.T @ x) / used

    def _cool(self, x: Tensor, points: Tensor, tau: float, value: float) -> tuple[float, float, float]:
        """One step of log tau: dL_q/dlog tau = Var_q(d) / tau, dF~/dlog tau = tau (ln K - H): both not negative, so tau can only fall."""
        found = assign(x, points, tau)
        if self.objective == "loss":
            distances = torch.cdist(x, points).square()
            mean = (found.weights * distances).sum(-1, keepdim=True)
            slope = ((found.weights * (distances - mean).square()).sum(-1) / tau).mean().item()
        else:
            slope = tau * (math.log(self.n_clusters) - found.entropy.mean().item())
        cooler = tau * math.exp(-self.temperature_rate * min(slope / max(abs(value), 1e-300), 1.0))
        cooler = max(cooler, 1e-6 * self._temperature(x))
        new = self._value(x, points, cooler)
        return (cooler, new, value - new) if new < value else (tau, value, 0.0)


def _check_squares(x: Tensor, centre: Tensor, name: str) -> None:
    """Raises: InputError where squared distances are beyond float64."""
    if not torch.isfinite(4 * (x - centre).square().sum()):
        raise InputError(
            f"squared distances overflow in float64: {name} holds values up to {x.abs().max():.2g}; divide the data by their size"
        )


def _onto_rows(points: Tensor, x: Tensor) -> Tensor:
    """The points projected on the span of the samples, where P = A X can be."""
    _, values, basis = torch.linalg.svd(x, full_matrices=False)
    basis = basis[values > values[0] * 1e-10]
    return points @ basis.T @ basis
