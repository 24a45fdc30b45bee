// Gradient of the log likelihood of imm and gpb2 on a GPU: one thread for each target, all steps in one launch.
//
//     reverse_kalman                 reverse of one Kalman filter, with the gradient of its model
//     share_slope                    reverse of a collapse
//     weigh_logs, transition_ratio   shares of log weights, and their derivative in the transition matrix
//     reverse_imm, reverse_gpb2      reverse of one step
//     differentiate_all              all steps of a target
//
// gpu_gradients.py puts targets_in_threads.cu before this file, whose steps run again here: forward with the beliefs at the
// start of each segment of the series kept, then segment by segment from the last, with those of every step kept. With
// one segment that is one pass. Gradients are summed over time in global memory, at addresses of the target alone.
//
// The formulas are those of gradients_in_lanes.py. Law: tests/kernels/test_cuda_gradients_agree_with_autograd.py.

constexpr int PACKED = STATE * (STATE + 1) / 2;
constexpr int KEPT = MODES * (STATE + PACKED + 1);  // numbers of the beliefs of a target: log h, means, covariances
constexpr Number HIGHEST = sizeof(Number) == 8 ? 118.297118815564 : 14.7871399;  // log(largest number) / 6

struct Slope {  // gradient in a tensor, [times or 1, items, targets]; null if it is not needed
    Number* start;
    long long time;  // numbers from step to step, 0 if the tensor does not change
};

struct GradientProblem {  // written by gpu_gradients.py, eight bytes for each member
    Problem series;
    const Number *outside, *end_mean, *end_covariance, *end_log_probability;  // gradients in the results; null if 0
    Slope transition, F, Q, H, R, b, d, observations, mean, covariance, log_probability;
    Number* kept;      // [slots, KEPT, targets]: the beliefs before each segment but the first, then those of its steps
    long long length;  // steps of a segment
};

struct Sum {  // entries of a gradient at one step of one target
    Number* start;
    long long targets;

    DEVICE Sum(const Slope& slope, long long targets, long long target, long long time)
        : start(slope.start ? slope.start + time * slope.time + target : nullptr), targets(targets) {}
    DEVICE explicit operator bool() const { return start; }
    DEVICE void add(int item, Number value) const { start[item * targets] += value; }
};

struct Sums {  // gradients in the model of one step, and in its observation
    Sum transition, F, Q, H, R, b, d;
    Number y[OBSERVATION];
};

struct Slopes {  // gradient in beliefs
    Gaussian<STATE> of[MODES];
    Number log_h[MODES];
};

// Reverse of one Kalman filter: from the gradient `bar` after the update to the one in `start`, before the prediction.
// `l_bar` is the gradient in the log density.
DEVICE Gaussian<STATE> reverse_kalman(const Gaussian<STATE>& start, const Gaussian<STATE>& bar, Number l_bar,
                                      const Model& model, int j, const Observation& look, Sums& sums) {
    constexpr int S = STATE, O = OBSERVATION;
    const Number *F = model.F + j * S * S, *H = model.H + j * O * S;
    const Number half = 0.5;
    Number HP[O][S];
    const Gaussian<S> before = predict(start, model, j);
    const Gain g = gain(before, expect(before, model, j, HP), HP, look, model, j);
    // u = S^-1 v, S^-1 with zeros for missing components, and K^T m_bar -----------------------------------------------
    Number u[O], inverse[O][O], Km[O];
    UNROLLED for (int r = O - 1; r >= 0; --r) {
        u[r] = g.z[r];
        UNROLLED for (int q = r + 1; q < O; ++q) u[r] -= g.D[r][q] * u[q];
        Km[r] = 0;
        UNROLLED for (int n = 0; n < S; ++n) Km[r] += g.K[r][n] * bar.mean[n];
        UNROLLED for (int q = 0; q < O; ++q) inverse[r][q] = r == q ? look.seen[r] : Number(0);
        sums.y[r] += Km[r];
    }
    UNROLLED for (int c = 0; c < O; ++c) {
        const Number reciprocal = 1 / g.D[c][c];
        UNROLLED for (int n = 0; n < O; ++n) {
            UNROLLED for (int r = c + 1; r < O; ++r) inverse[r][n] -= g.D[c][r] * inverse[c][n];
            inverse[c][n] *= reciprocal;
        }
    }
    UNROLLED for (int r = O - 2; r >= 0; --r)
        UNROLLED for (int q = r + 1; q < O; ++q)
            UNROLLED for (int n = 0; n < O; ++n) inverse[r][n] -= g.D[r][q] * inverse[q][n];
    // Gradient of the observation model -------------------------------------------------------------------------------
    UNROLLED for (int r = 0; r < O; ++r) {
        sums.y[r] -= l_bar * u[r];
        if (sums.d) sums.d.add(j * O + r, l_bar * u[r] - Km[r]);
    }
    if (sums.H || sums.R) {
        const Gaussian<S> after = update(before, g, model, j).after;
        UNROLLED for (int r = 0; r < O; ++r) {
            Number KP[S];  // K^T P_bar
            UNROLLED for (int i = 0; i < S; ++i) {
                KP[i] = 0;
                UNROLLED for (int n = 0; n < S; ++n) KP[i] += g.K[r][n] * bar.covariance[at(n, i)];
            }
            if (sums.R) UNROLLED for (int q = 0; q < O; ++q) {
                Number total = l_bar * (u[r] * u[q] - inverse[r][q]) - Km[r] * u[q] - Km[q] * u[r];
                total *= half;
                UNROLLED for (int n = 0; n < S; ++n) total += KP[n] * g.K[q][n];
                sums.R.add((j * O + r) * O + q, total);
            }
            if (sums.H) UNROLLED for (int i = 0; i < S; ++i) {
                Number moved = 0, turned = 0;  // P m_bar, K^T P_bar P
                UNROLLED for (int n = 0; n < S; ++n) {
                    moved += after.covariance[at(i, n)] * bar.mean[n];
                    turned += KP[n] * after.covariance[at(n, i)];
                }
                Number total = u[r] * moved - Km[r] * after.mean[i] - 2 * turned;
                total += l_bar * (u[r] * after.mean[i] - g.K[r][i]);
                sums.H.add((j * O + r) * S + i, total);
            }
        }
    }
    // Reverse of the update -------------------------------------------------------------------------------------------
    Gaussian<S> predicted;  // gradient
    Number score[S], product[S][S];  // H^T u; S^-1 H in its first rows, then P_bar A
    UNROLLED for (int i = 0; i < S; ++i) {
        score[i] = predicted.mean[i] = 0;
        UNROLLED for (int r = 0; r < O; ++r) score[i] += read(H + r * S + i) * u[r];
        UNROLLED for (int n = 0; n < S; ++n) predicted.mean[i] += g.A[n][i] * bar.mean[n];
    }
    Number SH[O][S];
    UNROLLED for (int r = 0; r < O; ++r)
        UNROLLED for (int i = 0; i < S; ++i) {
            SH[r][i] = 0;
            UNROLLED for (int q = 0; q < O; ++q) SH[r][i] += inverse[r][q] * read(H + q * S + i);
        }
    UNROLLED for (int n = 0; n < S; ++n)
        UNROLLED for (int c = 0; c < S; ++c) {
            product[n][c] = 0;
            UNROLLED for (int i = 0; i < S; ++i) product[n][c] += bar.covariance[at(n, i)] * g.A[i][c];
        }
    UNROLLED for (int i = 0; i < S; ++i)
        UNROLLED for (int c = 0; c <= i; ++c) {
            Number information = 0, total = 0;
            UNROLLED for (int r = 0; r < O; ++r) information += read(H + r * S + i) * SH[r][c];
            UNROLLED for (int n = 0; n < S; ++n) total += g.A[n][i] * product[n][c];
            const Number moved = predicted.mean[i] * score[c] + predicted.mean[c] * score[i];
            predicted.covariance[at(i, c)] = total + half * (l_bar * (score[i] * score[c] - information) + moved);
        }
    UNROLLED for (int i = 0; i < S; ++i) predicted.mean[i] += l_bar * score[i];
    // Gradient of the motion model, and reverse of the motion ---------------------------------------------------------
    Gaussian<S> result;
    UNROLLED for (int i = 0; i < S; ++i) {
        if (sums.b) sums.b.add(j * S + i, predicted.mean[i]);
        if (sums.Q)
            UNROLLED for (int c = 0; c < S; ++c) sums.Q.add((j * S + i) * S + c, predicted.covariance[at(i, c)]);
        UNROLLED for (int c = 0; c < S; ++c) {  // P_bar F
            product[i][c] = 0;
            UNROLLED for (int n = 0; n < S; ++n) product[i][c] += predicted.covariance[at(i, n)] * read(F + n * S + c);
        }
        if (sums.F) UNROLLED for (int c = 0; c < S; ++c) {
            Number total = 0;
            UNROLLED for (int n = 0; n < S; ++n) total += product[i][n] * start.covariance[at(n, c)];
            sums.F.add((j * S + i) * S + c, predicted.mean[i] * start.mean[c] + 2 * total);
        }
    }
    UNROLLED for (int i = 0; i < S; ++i) {
        result.mean[i] = 0;
        UNROLLED for (int n = 0; n < S; ++n) result.mean[i] += read(F + n * S + i) * predicted.mean[n];
        UNROLLED for (int c = 0; c <= i; ++c) {
            Number total = 0;
            UNROLLED for (int n = 0; n < S; ++n) total += read(F + n * S + i) * product[n][c];
            result.covariance[at(i, c)] = total;
        }
    }
    return result;
}

// Reverse of a collapse for Gaussian `one` with its share: adds its gradient to `to`, and returns that in the share.
DEVICE Number share_slope(const Gaussian<STATE>& bar, const Gaussian<STATE>& one, const Gaussian<STATE>& all, Number share,
                          Gaussian<STATE>& to) {
    Number slope = 0;
    UNROLLED for (int i = 0; i < STATE; ++i) {
        Number total = 0;
        UNROLLED for (int n = 0; n < STATE; ++n) {
            total += bar.covariance[at(i, n)] * (one.mean[n] - all.mean[n]);
            slope += bar.covariance[at(i, n)] * (one.covariance[at(i, n)] - all.covariance[at(i, n)]);
        }
        slope += (one.mean[i] - all.mean[i]) * (bar.mean[i] + total);
        to.mean[i] += share * (bar.mean[i] + 2 * total);
        UNROLLED for (int n = 0; n <= i; ++n) to.covariance[at(i, n)] += share * bar.covariance[at(i, n)];
    }
    return slope;
}

// Shares of log sum_i T_ij exp a_i, which is returned. With total weight 0 the sum is -inf and the shares are those of
// exp a_i, uniform if these are all 0.
DEVICE Number weigh_logs(const Number* transition, int j, const Number (&a)[MODES], Number (&share)[MODES]) {
    Number top = NEVER, any_top = NEVER, total = 0;
    ROLLED for (int i = 0; i < MODES; ++i) {
        any_top = fmax(any_top, a[i]);
        top = fmax(top, read(transition + i * MODES + j) > 0 ? a[i] : NEVER);
    }
    const bool is_alive = top > NEVER, is_possible = any_top > NEVER;
    ROLLED for (int i = 0; i < MODES; ++i) {
        const Number weight = is_alive ? read(transition + i * MODES + j) : Number(1);
        const Number away = is_possible ? a[i] - (is_alive ? top : any_top) : Number(0);
        total += share[i] = weight > 0 ? weight * exp(away) : Number(0);
    }
    ROLLED for (int i = 0; i < MODES; ++i) share[i] /= total;
    return is_alive ? top + log(total) : NEVER;
}

// Derivative of log sum_i T_ij exp a_i in T_ij. A mode with T_ij = 0 may lie far above the sum: the bound keeps inf away
// from slopes of 0, as that of weigh in ../../filters/moment_matching.py does.
DEVICE Number transition_ratio(Number a, Number log_sum) { return exp(fmin(a - log_sum, HIGHEST)); }

// -------------------------------------------------------------------------- reverse of one step, from `bar` to `earlier`
// `mode_slope` is the gradient in the joint log weights of the modes, where log pi_j = weight_j - log sum exp weight.

// Reverse of one step of imm.
DEVICE void reverse_imm(const Beliefs& x, const Slopes& bar, const Number (&mode_slope)[MODES], const Model& model,
                        const Observation& look, Sums& sums, Slopes& earlier) {
    Number share[HISTORIES];
    ROLLED for (int j = 0; j < MODES; ++j) {
        const Number log_c = weigh(x, model.transition, j, share).log_c;
        const Gaussian<STATE> mixed = collapse(share, x.of, MODES);
        const Gaussian<STATE> start = reverse_kalman(mixed, bar.of[j], mode_slope[j], model, j, look, sums);
        ROLLED for (int i = 0; i < MODES; ++i) {
            const Number slope = mode_slope[j] + share_slope(start, x.of[i], mixed, share[i], earlier.of[i]);
            earlier.log_h[i] += share[i] * slope;
            if (sums.transition && log_c > NEVER)
                sums.transition.add(i * MODES + j, transition_ratio(x.log_h[i], log_c) * slope);
        }
    }
}

// Reverse of one step of gpb2.
DEVICE void reverse_gpb2(const Beliefs& x, const Slopes& bar, const Number (&mode_slope)[MODES], const Model& model,
                         const Observation& look, Sums& sums, Slopes& earlier) {
    Gaussian<STATE> branch[MODES];
    Number weight[MODES], share[MODES], HP[OBSERVATION][STATE];
    ROLLED for (int j = 0; j < MODES; ++j) {
        ROLLED for (int i = 0; i < MODES; ++i) {
            const Gaussian<STATE> before = predict(x.of[i], model, j);
            const Gain g = gain(before, expect(before, model, j, HP), HP, look, model, j);
            branch[i] = update(before, g, model, j).after;
            weight[i] = g.log_likelihood + x.log_h[i];
        }
        const Number log_w = weigh_logs(model.transition, j, weight, share);
        const Gaussian<STATE> after = collapse(share, branch, MODES);
        ROLLED for (int i = 0; i < MODES; ++i) {
            Gaussian<STATE> one = {};
            const Number slope = mode_slope[j] + share_slope(bar.of[j], branch[i], after, share[i], one);
            earlier.log_h[i] += share[i] * slope;
            if (sums.transition && log_w > NEVER)
                sums.transition.add(i * MODES + j, transition_ratio(weight[i], log_w) * slope);
            const Gaussian<STATE> start = reverse_kalman(x.of[i], one, share[i] * slope, model, j, look, sums);
            UNROLLED for (int n = 0; n < STATE; ++n) earlier.of[i].mean[n] += start.mean[n];
            UNROLLED for (int n = 0; n < PACKED; ++n) earlier.of[i].covariance[n] += start.covariance[n];
        }
    }
}

// ----------------------------------------------------------------------------------------------- all steps of a target
struct Kept {  // a slot of kept beliefs
    Number* start;
    long long targets;

    DEVICE Kept(const GradientProblem& problem, long long slot, long long target)
        : start(problem.kept + slot * KEPT * problem.series.targets + target), targets(problem.series.targets) {}
    DEVICE Number& operator[](int item) const { return start[item * targets]; }
};

DEVICE void keep(const Kept& kept, const Beliefs& x) {
    BY_MODE for (int i = 0; i < MODES; ++i) {
        kept[i * (STATE + PACKED + 1)] = x.log_h[i];
        UNROLLED for (int n = 0; n < STATE; ++n) kept[i * (STATE + PACKED + 1) + 1 + n] = x.of[i].mean[n];
        UNROLLED for (int n = 0; n < PACKED; ++n)
            kept[i * (STATE + PACKED + 1) + 1 + STATE + n] = x.of[i].covariance[n];
    }
}

DEVICE void restore(const Kept& kept, Beliefs& x) {
    x.grown = MODES;
    BY_MODE for (int i = 0; i < MODES; ++i) {
        x.h[i] = exp(x.log_h[i] = kept[i * (STATE + PACKED + 1)]);
        UNROLLED for (int n = 0; n < STATE; ++n) x.of[i].mean[n] = kept[i * (STATE + PACKED + 1) + 1 + n];
        UNROLLED for (int n = 0; n < PACKED; ++n)
            x.of[i].covariance[n] = kept[i * (STATE + PACKED + 1) + 1 + STATE + n];
    }
}

DEVICE void advance(Beliefs& x, const Problem& series, long long target, long long time, bool& is_finite) {
    const Page page{series, nullptr, 0, 0, 0, 0, false};
    const Model model = model_at(series, target, time);
    const Observation look = look_at(series, target, time);
    Number step;
    if constexpr (DEPTH == 0) step = advance_imm(x, model, look, page, is_finite);
    if constexpr (DEPTH == 2) step = advance_gpb(x, model, look, page, is_finite);
    is_finite = is_finite && fabs(step) < FINITE;
}

// Gradient in the last beliefs, of covariances made symmetric.
DEVICE void begin_reverse(Slopes& bar, const GradientProblem& problem, long long target) {
    constexpr int S = STATE;
    bar = {};
    ROLLED for (int i = 0; i < MODES; ++i) {
        const long long item = target * MODES + i;
        if (problem.end_log_probability) bar.log_h[i] = problem.end_log_probability[item];
        if (problem.end_mean)
            UNROLLED for (int n = 0; n < S; ++n) bar.of[i].mean[n] = problem.end_mean[item * S + n];
        if (problem.end_covariance) {
            const Number* end = problem.end_covariance + item * S * S;
            UNROLLED for (int a = 0; a < S; ++a)
                UNROLLED for (int c = 0; c <= a; ++c)
                    bar.of[i].covariance[at(a, c)] = Number(0.5) * (end[a * S + c] + end[c * S + a]);
        }
    }
}

// Gradient in the beliefs at time 0.
DEVICE void end_reverse(const Slopes& bar, const GradientProblem& problem, long long target) {
    constexpr int S = STATE;
    const long long targets = problem.series.targets;
    const Sum mean(problem.mean, targets, target, 0), covariance(problem.covariance, targets, target, 0);
    const Sum log_h(problem.log_probability, targets, target, 0);
    ROLLED for (int i = 0; i < MODES; ++i) {
        if (log_h) log_h.add(i, bar.log_h[i]);
        if (mean) UNROLLED for (int n = 0; n < S; ++n) mean.add(i * S + n, bar.of[i].mean[n]);
        if (covariance)
            UNROLLED for (int n = 0; n < S * S; ++n) covariance.add(i * S * S + n, bar.of[i].covariance[at(n / S, n % S)]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) differentiate_all(const __grid_constant__ GradientProblem problem) {
    const Problem& series = problem.series;
    const long long target = (long long)blockIdx.x * THREADS + threadIdx.x, targets = series.targets;
    if (target >= targets) return;
    const long long length = problem.length, segments = (series.steps + length - 1) / length;
    const Number outside = problem.outside ? problem.outside[target] : Number(0);
    bool is_finite = true;
    Beliefs x;
    begin(x, series, target);
    ROLLED for (long long time = 0; time < (segments - 1) * length; ++time) {
        advance(x, series, target, time, is_finite);
        if ((time + 1) % length == 0) keep(Kept(problem, time / length, target), x);
    }
    Slopes bar;
    begin_reverse(bar, problem, target);
    Number after_h[MODES];  // mode probabilities after the step that is reversed
    ROLLED for (long long segment = segments - 1; segment >= 0; --segment) {
        const long long from = segment * length;
        const long long until = from + length < series.steps ? from + length : series.steps;
        // Forward, with the beliefs before every step kept ------------------------------------------------------------
        if (segment > 0)
            restore(Kept(problem, segment - 1, target), x);
        else
            begin(x, series, target);
        ROLLED for (long long time = from; time < until; ++time) {
            keep(Kept(problem, segments - 1 + time - from, target), x);
            if (time + 1 < until || until == series.steps) advance(x, series, target, time, is_finite);
        }
        if (until == series.steps)
            ROLLED for (int j = 0; j < MODES; ++j) after_h[j] = x.h[j];
        // Reverse -----------------------------------------------------------------------------------------------------
        ROLLED for (long long time = until - 1; time >= from; --time) {
            restore(Kept(problem, segments - 1 + time - from, target), x);
            Sums sums{{problem.transition, targets, target, time}, {problem.F, targets, target, time},
                      {problem.Q, targets, target, time},          {problem.H, targets, target, time},
                      {problem.R, targets, target, time},          {problem.b, targets, target, time},
                      {problem.d, targets, target, time},          {}};
            Number rest = outside, mode_slope[MODES];
            ROLLED for (int j = 0; j < MODES; ++j) rest -= bar.log_h[j];
            ROLLED for (int j = 0; j < MODES; ++j) mode_slope[j] = after_h[j] * rest + bar.log_h[j];
            Slopes earlier = {};
            const Model model = model_at(series, target, time);
            const Observation look = look_at(series, target, time);
            if constexpr (DEPTH == 0) reverse_imm(x, bar, mode_slope, model, look, sums, earlier);
            if constexpr (DEPTH == 2) reverse_gpb2(x, bar, mode_slope, model, look, sums, earlier);
            const Sum y(problem.observations, targets, target, time);
            if (y) UNROLLED for (int r = 0; r < OBSERVATION; ++r) y.add(r, sums.y[r]);
            bar = earlier;
            ROLLED for (int j = 0; j < MODES; ++j) after_h[j] = x.h[j];
        }
    }
    end_reverse(bar, problem, target);
    if (!is_finite) *series.failed = 1;
}
