// Steps of switching filters on a GPU: one thread for each target, all steps in one launch.
//
//     predict, expect, gain, update              the Kalman filter
//     weigh, collapse, merge, normalize          weights and moment matching
//     advance_imm, advance_gpb1, advance_gpb     one transition and one observation, in parallel form
//     filter_all                                 all steps of a target
//
// gpu.py prepends the constants Number, MODES, STATE, OBSERVATION, DEPTH, MOST (largest number of histories), WANTED (one
// bit for each requested field of `Filtered`), THREADS and LANES, and the enumeration `Reported` of these fields in order
// (fields.py), with their number REPORTED. Fields that are not requested are not computed: functions are pure, and the
// compiler removes those whose results are unused. Loops over components are unrolled, so that the filter of one mode
// lies in registers, and so are loops over modes if all fit; the rest is local memory.
//
// The computation is that of ../../filters/gaussian/switching.py: log weights, Joseph's form, columns of weight 0. A
// number that is not finite (no density, or density 0 under a mode) sets a flag, and the caller uses the torch path.

#define DEVICE __device__ __forceinline__
#define UNROLLED _Pragma("unroll")
#define BY_MODE _Pragma("unroll AT_ONCE")
#define ROLLED _Pragma("unroll 1")
#define NEVER Number(-__int_as_float(0x7f800000))  // -inf and, next, NaN: there are no headers that define them
#define UNKNOWN Number(__int_as_float(0x7fc00000))

constexpr int HISTORIES = DEPTH == 1 ? MODES : MOST > MODES ? MOST : MODES;
constexpr int GAUSSIANS = DEPTH == 1 ? 1 : HISTORIES;
constexpr int AT_ONCE = DEPTH < 2 && MODES * STATE * (STATE + 3) / 2 * sizeof(Number) <= 448 && MODES <= 4 ? MODES : 1;
constexpr Number LOG_2_PI = 1.8378770664093454836;
constexpr Number LEAST = 1e-30, GREATEST = 1e30;  // total weights in this range are summed directly, others as logs
constexpr Number FINITE = 3e38;

// -------------------------------------------------------------------------------------------------- inputs and outputs
struct Field {  // a tensor, with its strides from target to target and from step to step
    const Number* start;
    long long row, time;
};

struct Problem {  // written by gpu.py, eight bytes for each member
    Field transition, F, Q, H, R, b, d, observations, mean, covariance, log_probability, log_likelihood;
    const bool* seen;  // mask of observed entries; null if all are observed
    long long targets, steps, first_reported, histories;
    Number* reported[REPORTED];  // [targets, times, items]
    Number *new_mean, *new_covariance, *new_log_probability, *new_log_likelihood;
    int* failed;
};

struct Model {  // model of one step of one target
    const Number *transition, *F, *Q, *H, *R, *b, *d;
};

struct Observation {
    Number y[OBSERVATION], seen[OBSERVATION];  // 1 or 0
};

// Symmetric matrix: lower triangle, packed row by row.
DEVICE constexpr int at(int i, int j) { return i >= j ? i * (i + 1) / 2 + j : j * (j + 1) / 2 + i; }

template <int N>
struct Gaussian {
    Number mean[N], covariance[N * (N + 1) / 2];
};

struct Beliefs {  // Gaussians of mode histories, newest mode last in the index, and their probabilities
    Gaussian<STATE> of[GAUSSIANS];
    Number log_h[HISTORIES], h[HISTORIES];
    int grown;  // number of histories, while it grows

    DEVICE int histories() const { return DEPTH < 3 ? MODES : grown; }
};

DEVICE Number read(const Number* number) { return __ldg(number); }

DEVICE const Number* place(const Field& field, long long target, long long time) {
    return field.start + target * field.row + time * field.time;
}

DEVICE constexpr int widest(int a, int b) { return a > b ? a : b; }
constexpr int WIDTH = widest(widest(STATE * STATE, OBSERVATION * OBSERVATION), MODES) | 1;  // odd: no bank conflicts

struct Page {  // output of a warp: all its lanes write the row of one target after another
    const Problem& problem;
    Number* stage;
    long long first, times, time;
    int lane;
    bool open;

    // Write `value`(n) of every target to its row; that of target 0 starts at `start`.
    template <int N, class Value>
    DEVICE void put(Number* start, long long row, Value value) const {
        UNROLLED for (int n = 0; n < N; ++n) stage[lane * WIDTH + n] = value(n);
        __syncwarp();
        ROLLED for (int i = 0; i < N; ++i) {  // unrolling would keep all addresses in registers
            const int element = i * LANES + lane, of = element / N, n = element % N;
            if (first + of < problem.targets) start[(first + of) * row + n] = stage[of * WIDTH + n];
        }
        __syncwarp();
    }

    // Write N of the ITEMS of a field at this time, starting with item `from`.
    template <int FIELD, int ITEMS, int N, class Value>
    DEVICE void say(int from, Value value) const {
        if constexpr (WANTED >> FIELD & 1) put<N>(problem.reported[FIELD] + time * ITEMS + from, times * ITEMS, value);
    }

    template <int MEANS, int COVARIANCES, int ITEMS, int N>
    DEVICE void say(int j, const Gaussian<N>& x) const {
        say<MEANS, ITEMS * N, N>(j * N, [&](int n) { return x.mean[n]; });
        say<COVARIANCES, ITEMS * N * N, N * N>(j * N * N, [&](int n) { return x.covariance[at(n / N, n % N)]; });
    }
};

// --------------------------------------------------------------------------------------------------- the Kalman filter
// Predict the state: m' = F m + b, P' = F P F^T + Q.
DEVICE Gaussian<STATE> predict(const Gaussian<STATE>& x, const Model& model, int j) {
    constexpr int S = STATE;
    const Number *F = model.F + j * S * S, *Q = model.Q + j * S * S, *b = model.b + j * S;
    Gaussian<S> moved;
    UNROLLED for (int i = 0; i < S; ++i) {
        Number mean = read(b + i), row[S];
        UNROLLED for (int n = 0; n < S; ++n) mean += read(F + i * S + n) * x.mean[n];
        moved.mean[i] = mean;
        UNROLLED for (int c = 0; c < S; ++c) {
            row[c] = 0;
            UNROLLED for (int n = 0; n < S; ++n) row[c] += read(F + i * S + n) * x.covariance[at(n, c)];
        }
        UNROLLED for (int c = 0; c <= i; ++c) {
            Number total = read(Q + i * S + c);
            UNROLLED for (int n = 0; n < S; ++n) total += row[n] * read(F + c * S + n);
            moved.covariance[at(i, c)] = total;
        }
    }
    return moved;
}

// Predict the observation: H m + d and S = H P H^T + R; `HP` keeps H P.
DEVICE Gaussian<OBSERVATION> expect(const Gaussian<STATE>& x, const Model& model, int j,
                                    Number (&HP)[OBSERVATION][STATE]) {
    constexpr int S = STATE, O = OBSERVATION;
    const Number *H = model.H + j * O * S, *R = model.R + j * O * O, *d = model.d + j * O;
    Gaussian<O> expected;
    UNROLLED for (int r = 0; r < O; ++r) {
        Number mean = read(d + r);
        UNROLLED for (int n = 0; n < S; ++n) mean += read(H + r * S + n) * x.mean[n];
        expected.mean[r] = mean;
        UNROLLED for (int c = 0; c < S; ++c) {
            HP[r][c] = 0;
            UNROLLED for (int n = 0; n < S; ++n) HP[r][c] += read(H + r * S + n) * x.covariance[at(n, c)];
        }
        UNROLLED for (int q = 0; q <= r; ++q) {
            Number total = read(R + r * O + q);
            UNROLLED for (int n = 0; n < S; ++n) total += HP[r][n] * read(H + q * S + n);
            expected.covariance[at(r, q)] = total;
        }
    }
    return expected;
}

struct Gain {  // of one observation
    Number D[OBSERVATION][OBSERVATION], z[OBSERVATION];  // factors of S, and D^-1 L^-1 v
    Number K[OBSERVATION][STATE], A[STATE][STATE];       // K^T and I - K H
    Number mean[STATE], log_likelihood;                  // m + K v and log N(v; 0, S)
};

// Find the gain of an observation after `expect`, and update the mean.
//
// S = L D L^T with ones on the diagonal of L: W = L^-1 H P, z = L^-1 v, K^T = L^-T D^-1 W. Below the diagonal the array
// D holds the rest of S, above it L^T. A missing component has a row of the identity in S and zeros elsewhere.
DEVICE Gain gain(const Gaussian<STATE>& x, const Gaussian<OBSERVATION>& expected, Number (&W)[OBSERVATION][STATE],
                 const Observation& look, const Model& model, int j) {
    constexpr int S = STATE, O = OBSERVATION;
    const Number* H = model.H + j * O * S;
    Gain found;
    Number(&D)[O][O] = found.D, (&z)[O] = found.z, (&K)[O][S] = found.K, (&A)[S][S] = found.A;
    Number count = 0, square = 0, log_det = 0;
    UNROLLED for (int r = 0; r < O; ++r) {
        count += look.seen[r];
        z[r] = look.seen[r] * (look.y[r] - expected.mean[r]);
        UNROLLED for (int n = 0; n < S; ++n) W[r][n] *= look.seen[r];
        UNROLLED for (int q = 0; q < r; ++q) D[r][q] = look.seen[r] * look.seen[q] * expected.covariance[at(r, q)];
        D[r][r] = look.seen[r] * expected.covariance[at(r, r)] + (1 - look.seen[r]);
    }
    UNROLLED for (int c = 0; c < O; ++c) {
        const Number inverse = 1 / D[c][c];
        log_det += log(D[c][c]);
        square += z[c] * z[c] * inverse;
        UNROLLED for (int r = c + 1; r < O; ++r) {
            const Number below = D[r][c] * inverse;
            D[c][r] = below;
            UNROLLED for (int q = c + 1; q <= r; ++q) D[r][q] -= below * D[q][c];
            z[r] -= below * z[c];
            UNROLLED for (int n = 0; n < S; ++n) W[r][n] -= below * W[c][n];
        }
        z[c] *= inverse;
        UNROLLED for (int n = 0; n < S; ++n) K[c][n] = W[c][n] * inverse;
    }
    UNROLLED for (int n = 0; n < S; ++n) {  // m' = m + W^T D^-1 z, with W not yet divided by D
        found.mean[n] = x.mean[n];
        UNROLLED for (int r = 0; r < O; ++r) found.mean[n] += W[r][n] * z[r];
    }
    UNROLLED for (int c = 1; c < O; ++c) {
        const int r = O - 1 - c;
        UNROLLED for (int n = 0; n < S; ++n)
            UNROLLED for (int q = r + 1; q < O; ++q) K[r][n] -= D[r][q] * K[q][n];
    }
    UNROLLED for (int i = 0; i < S; ++i)
        UNROLLED for (int c = 0; c < S; ++c) {
            A[i][c] = i == c;
            UNROLLED for (int r = 0; r < O; ++r) A[i][c] -= K[r][i] * read(H + r * S + c);
        }
    found.log_likelihood = Number(-0.5) * (square + count * LOG_2_PI + log_det);
    return found;
}

struct Updated {
    Gaussian<STATE> after;
    Number log_likelihood;
};

// Update to m + K v and Joseph's form of P, A P A^T + K R K^T, after `gain`.
DEVICE Updated update(const Gaussian<STATE>& x, const Gain& gain, const Model& model, int j) {
    constexpr int S = STATE, O = OBSERVATION;
    const Number* R = model.R + j * O * O;
    Updated found;
    UNROLLED for (int i = 0; i < S; ++i) {
        Number AP[S], RK[O];
        found.after.mean[i] = gain.mean[i];
        UNROLLED for (int c = 0; c < S; ++c) {
            AP[c] = 0;
            UNROLLED for (int n = 0; n < S; ++n) AP[c] += gain.A[i][n] * x.covariance[at(n, c)];
        }
        UNROLLED for (int r = 0; r < O; ++r) {
            RK[r] = 0;
            UNROLLED for (int q = 0; q < O; ++q) RK[r] += read(R + r * O + q) * gain.K[q][i];
        }
        UNROLLED for (int c = 0; c <= i; ++c) {
            Number total = 0;
            UNROLLED for (int n = 0; n < S; ++n) total += AP[n] * gain.A[c][n];
            UNROLLED for (int r = 0; r < O; ++r) total += RK[r] * gain.K[r][c];
            found.after.covariance[at(i, c)] = total;
        }
    }
    found.log_likelihood = gain.log_likelihood;
    return found;
}

// ----------------------------------------------------------------------------------------- weights and moment matching
struct Column {  // predicted probability of mode j: log c_j, c_j
    Number log_c, c;
};

// c_j = sum_i T_ij h_i, and the shares T_ij h_i / c_j of histories i, whose newest mode is i modulo k.
//
// With total weight 0, log c_j is -inf and the shares are those of h_i, uniform if these are all 0.
DEVICE Column weigh(const Beliefs& x, const Number* transition, int j, Number (&share)[HISTORIES]) {
    Number total = 0;
    BY_MODE for (int i = 0; i < x.histories(); ++i)
        total += share[i] = read(transition + (i % MODES) * MODES + j) * x.h[i];
    Column found{log(total), total};
    if (!(total > LEAST && total < GREATEST)) {
        Number top = NEVER, any_top = NEVER;
        BY_MODE for (int i = 0; i < x.histories(); ++i) {
            const bool comes = read(transition + (i % MODES) * MODES + j) > 0;
            any_top = fmax(any_top, x.log_h[i]);
            top = fmax(top, comes ? x.log_h[i] : NEVER);
        }
        const bool is_alive = top > NEVER, is_possible = any_top > NEVER;
        total = 0;
        BY_MODE for (int i = 0; i < x.histories(); ++i) {
            const Number weight = is_alive ? read(transition + (i % MODES) * MODES + j) : Number(1);
            const Number away = is_possible ? x.log_h[i] - (is_alive ? top : any_top) : Number(0);
            total += share[i] = weight > 0 ? weight * exp(away) : Number(0);
        }
        found.log_c = is_alive ? top + log(total) : NEVER;
        found.c = exp(found.log_c);
    }
    const Number inverse = 1 / total;
    BY_MODE for (int i = 0; i < x.histories(); ++i) share[i] *= inverse;
    return found;
}

// Collapse: m = sum_i r_i m_i, P = sum_i r_i (P_i + (m_i - m)(m_i - m)^T).
DEVICE Gaussian<STATE> collapse(const Number* share, const Gaussian<STATE>* x, int items) {
    Gaussian<STATE> all = {};
    BY_MODE for (int i = 0; i < items; ++i)
        UNROLLED for (int a = 0; a < STATE; ++a) all.mean[a] += share[i] * x[i].mean[a];
    BY_MODE for (int i = 0; i < items; ++i) {
        Number apart[STATE];
        UNROLLED for (int a = 0; a < STATE; ++a) apart[a] = x[i].mean[a] - all.mean[a];
        UNROLLED for (int a = 0; a < STATE; ++a)
            UNROLLED for (int c = 0; c <= a; ++c)
                all.covariance[at(a, c)] += share[i] * (x[i].covariance[at(a, c)] + apart[a] * apart[c]);
    }
    return all;
}

// Collapse with the shares of every mode j, in place: one component of all Gaussians at a time.
DEVICE void mix(const Number (&share)[MODES][HISTORIES], Gaussian<STATE> (&x)[GAUSSIANS]) {
    Number mean[MODES][STATE], old[MODES];
    BY_MODE for (int j = 0; j < MODES; ++j)
        UNROLLED for (int a = 0; a < STATE; ++a) {
            mean[j][a] = 0;
            UNROLLED for (int i = 0; i < MODES; ++i) mean[j][a] += share[j][i] * x[i].mean[a];
        }
    UNROLLED for (int a = 0; a < STATE; ++a)
        UNROLLED for (int c = 0; c <= a; ++c) {
            UNROLLED for (int i = 0; i < MODES; ++i) old[i] = x[i].covariance[at(a, c)];
            BY_MODE for (int j = 0; j < MODES; ++j) {
                Number total = 0;
                UNROLLED for (int i = 0; i < MODES; ++i) {
                    const Number spread = (x[i].mean[a] - mean[j][a]) * (x[i].mean[c] - mean[j][c]);
                    total += share[j][i] * (old[i] + spread);
                }
                x[j].covariance[at(a, c)] = total;
            }
        }
    BY_MODE for (int j = 0; j < MODES; ++j)
        UNROLLED for (int a = 0; a < STATE; ++a) x[j].mean[a] = mean[j][a];
}

struct Shares {  // weights of the previous sum and of the new term
    Number before, now;
};

struct Mass {  // running sum of w_i exp a_i
    Number top = NEVER, sum = 0;

    DEVICE Shares add(Number weight, Number a) {
        if (!(weight > 0) || a == NEVER) return {1, 0};
        const Number less = exp(-fabs(a - top));
        const Number old = a > top ? sum * less : sum, mass = a > top ? weight : weight * less;
        top = fmax(top, a);
        sum = old + mass;
        return {old / sum, mass / sum};
    }

    DEVICE Shares add(Number weight) {
        const Number old = sum;
        sum += weight;
        return weight > 0 ? Shares{old / sum, weight / sum} : Shares{1, 0};
    }

    DEVICE Number logarithm() const { return sum > 0 ? top + log(sum) : NEVER; }
};

// Collapse of Gaussians added one after another, as partial results of attention are combined.
template <int N>
DEVICE void merge(Gaussian<N>& all, const Gaussian<N>& one, Shares share) {
    Number apart[N];
    UNROLLED for (int a = 0; a < N; ++a) {
        apart[a] = one.mean[a] - all.mean[a];
        all.mean[a] = share.before * all.mean[a] + share.now * one.mean[a];
    }
    UNROLLED for (int a = 0; a < N; ++a)
        UNROLLED for (int c = 0; c <= a; ++c) {
            const Number inside = one.covariance[at(a, c)] + share.before * apart[a] * apart[c];
            all.covariance[at(a, c)] = share.before * all.covariance[at(a, c)] + share.now * inside;
        }
}

// Store log_h = a - log sum exp a and h = exp log_h; returns the log sum.
DEVICE Number normalize(const Number (&a)[HISTORIES], Beliefs& x) {
    Number top = NEVER, total = 0;
    BY_MODE for (int i = 0; i < x.histories(); ++i) top = fmax(top, a[i]);
    BY_MODE for (int i = 0; i < x.histories(); ++i) total += x.h[i] = exp(a[i] - top);
    const Number log_total = log(total), inverse = 1 / total;
    BY_MODE for (int i = 0; i < x.histories(); ++i) {
        x.log_h[i] = a[i] - top - log_total;
        x.h[i] *= inverse;
    }
    return top + log_total;
}

// ----------------------------------------------------------------------------------------------------- combined fields
struct Foreseen {  // running collapse of the predicted states and observations of all modes
    Mass mass;
    Gaussian<STATE> state = {};
    Gaussian<OBSERVATION> observation = {};

    DEVICE void add(const Page& page, int j, const Gaussian<STATE>& before, const Gaussian<OBSERVATION>& expected,
                    Column column, const Observation& look) {
        constexpr int K = MODES, O = OBSERVATION;
        const Shares share = mass.add(column.c);
        merge(state, before, share);
        merge(observation, expected, share);
        page.say<PREDICTED_MODE_MEAN, PREDICTED_MODE_COVARIANCE, K>(j, before);
        Gaussian<O> innovation = expected;
        UNROLLED for (int r = 0; r < O; ++r) innovation.mean[r] = missed(look, r, expected);
        page.say<MODE_INNOVATION, MODE_INNOVATION_COVARIANCE, K>(j, innovation);
    }

    DEVICE void say(const Page& page, const Observation& look, const Column (&column)[MODES]) const {
        page.say<PREDICTED_LOG_MODE_PROBABILITY, MODES, MODES>(0, [&](int j) { return column[j].log_c; });
        page.say<PREDICTED_MEAN, PREDICTED_COVARIANCE, 1>(0, state);
        Gaussian<OBSERVATION> innovation = observation;
        UNROLLED for (int r = 0; r < OBSERVATION; ++r) innovation.mean[r] = missed(look, r, observation);
        page.say<INNOVATION, INNOVATION_COVARIANCE, 1>(0, innovation);
    }

    DEVICE static Number missed(const Observation& look, int r, const Gaussian<OBSERVATION>& expected) {
        return look.seen[r] > 0 ? look.y[r] - expected.mean[r] : UNKNOWN;
    }
};

// ------------------------------------------------- the filters in parallel form: mix, predict, update, collapse
// Each returns log p(y | past) and clears `is_finite` if a density is not finite.

// One step of imm.   [theory 7.3]
DEVICE Number advance_imm(Beliefs& x, const Model& model, const Observation& look, const Page& page, bool& is_finite) {
    constexpr int K = MODES;
    Column column[K];
    Number share[K][HISTORIES], told[K], weight[HISTORIES], HP[OBSERVATION][STATE];  // plain-words: ok
    Foreseen foreseen;
    // Mix: the modes that may precede each mode j ---------------------------------------------------------------------
    BY_MODE for (int j = 0; j < K; ++j) column[j] = weigh(x, model.transition, j, share[j]);
    mix(share, x.of);
    // Predict and update: mode by mode --------------------------------------------------------------------------------
    BY_MODE for (int j = 0; j < K; ++j) {
        const Gaussian<STATE> before = predict(x.of[j], model, j);
        const Gaussian<OBSERVATION> expected = expect(before, model, j, HP);
        if (page.open) foreseen.add(page, j, before, expected, column[j], look);
        const Updated found = update(before, gain(before, expected, HP, look, model, j), model, j);
        x.of[j] = found.after;
        told[j] = found.log_likelihood;  // plain-words: ok
        weight[j] = told[j] + column[j].log_c;  // plain-words: ok
        is_finite = is_finite && fabs(told[j]) < FINITE;  // plain-words: ok
        if (page.open) page.say<MODE_MEAN, MODE_COVARIANCE, K>(j, found.after);
    }
    // Collapse: nothing -----------------------------------------------------------------------------------------------
    const Number step = normalize(weight, x);
    if (page.open) {
        foreseen.say(page, look, column);
        page.say<MODE_LOG_LIKELIHOOD, K, K>(0, [&](int j) { return told[j]; });  // plain-words: ok
        page.say<LOG_MODE_PROBABILITY, K, K>(0, [&](int j) { return x.log_h[j]; });
    }
    return step;
}

// One step of gpb1.   [theory 7.1]
DEVICE Number advance_gpb1(Beliefs& x, const Model& model, const Observation& look, const Page& page, bool& is_finite) {
    constexpr int K = MODES;
    Column column[K];
    Gaussian<STATE> one = {};
    Mass mass;
    Number share[HISTORIES], told[K], weight[HISTORIES], HP[OBSERVATION][STATE];  // plain-words: ok
    Foreseen foreseen;
    // Mix: nothing, there is one Gaussian -----------------------------------------------------------------------------
    BY_MODE for (int j = 0; j < K; ++j) column[j] = weigh(x, model.transition, j, share);
    // Predict and update: mode by mode --------------------------------------------------------------------------------
    BY_MODE for (int j = 0; j < K; ++j) {
        const Gaussian<STATE> before = predict(x.of[0], model, j);
        const Gaussian<OBSERVATION> expected = expect(before, model, j, HP);
        if (page.open) foreseen.add(page, j, before, expected, column[j], look);
        const Updated found = update(before, gain(before, expected, HP, look, model, j), model, j);
        told[j] = found.log_likelihood;  // plain-words: ok
        weight[j] = told[j] + column[j].log_c;  // plain-words: ok
        is_finite = is_finite && fabs(told[j]) < FINITE;  // plain-words: ok
        if (page.open) page.say<MODE_MEAN, MODE_COVARIANCE, K>(j, found.after);
        // Collapse: all modes to one ----------------------------------------------------------------------------------
        merge(one, found.after, mass.add(1, weight[j]));
    }
    x.of[0] = one;
    const Number step = normalize(weight, x);
    if (page.open) {
        foreseen.say(page, look, column);
        page.say<MODE_LOG_LIKELIHOOD, K, K>(0, [&](int j) { return told[j]; });  // plain-words: ok
        page.say<LOG_MODE_PROBABILITY, K, K>(0, [&](int j) { return x.log_h[j]; });
    }
    return step;
}

// One step of gpb of any depth.   [theory 7.2]
DEVICE Number advance_gpb(Beliefs& x, const Model& model, const Observation& look, const Page& page, bool& is_finite) {
    constexpr int K = MODES;
    const int oldest = x.histories() * K > MOST ? K : 1;
    const int rests = x.histories() / oldest;  // histories without their oldest mode
    Gaussian<STATE> next[GAUSSIANS];
    Column column[K];
    Number share[HISTORIES], told[K], weight[HISTORIES], log_pi[K], HP[OBSERVATION][STATE];  // plain-words: ok
    Foreseen foreseen;
    ROLLED for (int j = 0; j < K; ++j) {
        // Mix: nothing; the mixture is computed only to report the prediction of each mode ----------------------------
        if (page.open) {
            column[j] = weigh(x, model.transition, j, share);
            const Gaussian<STATE> before = predict(collapse(share, x.of, x.histories()), model, j);
            const Gaussian<OBSERVATION> expected = expect(before, model, j, HP);
            foreseen.add(page, j, before, expected, column[j], look);
        }
        Gaussian<STATE> of_mode = {};
        Mass mode_mass, likelihood;
        ROLLED for (int rest = 0; rest < rests; ++rest) {
            bool is_alive = false, is_possible = false;
            for (int i = 0; i < oldest; ++i) {
                const int history = i * rests + rest;
                is_possible |= x.log_h[history] > NEVER;
                is_alive |= x.log_h[history] > NEVER && read(model.transition + (history % K) * K + j) > 0;
            }
            Gaussian<STATE> kept = {};
            Mass mass;
            ROLLED for (int i = 0; i < oldest; ++i) {
                // Predict and update: all histories that collapse to one ----------------------------------------------
                const int history = i * rests + rest;
                const Gaussian<STATE> before = predict(x.of[history], model, j);
                const Gaussian<OBSERVATION> expected = expect(before, model, j, HP);
                const Updated found = update(before, gain(before, expected, HP, look, model, j), model, j);
                is_finite = is_finite && fabs(found.log_likelihood) < FINITE;
                if (page.open) likelihood.add(share[history], found.log_likelihood);
                // Collapse: the oldest mode, with weights that include the observation --------------------------------
                const Number comes = is_alive ? read(model.transition + (history % K) * K + j) : Number(1);
                const Number a = is_possible ? x.log_h[history] + found.log_likelihood : Number(0);
                merge(kept, found.after, mass.add(comes, a));
            }
            next[rest * K + j] = kept;
            weight[rest * K + j] = is_alive ? mass.logarithm() : NEVER;
            if (page.open) {  // collapse the histories of each mode
                const Number a = column[j].log_c > NEVER ? weight[rest * K + j] : Number(0);
                merge(of_mode, kept, mode_mass.add(1, a));
            }
        }
        if (page.open) {
            // Sum in the log domain: histories that only this observation makes likely have prior shares that
            // underflow. A mode of probability 0 gets the value of its hypothetical shares.
            const bool is_alive = column[j].log_c > NEVER;
            log_pi[j] = is_alive ? mode_mass.logarithm() : NEVER;
            told[j] = is_alive ? log_pi[j] - column[j].log_c : likelihood.logarithm();  // plain-words: ok
            page.say<MODE_MEAN, MODE_COVARIANCE, K>(j, of_mode);
        }
    }
    x.grown = rests * K;
    ROLLED for (int i = 0; i < x.histories(); ++i) x.of[i] = next[i];
    const Number step = normalize(weight, x);
    if (page.open) {
        foreseen.say(page, look, column);
        page.say<MODE_LOG_LIKELIHOOD, K, K>(0, [&](int j) { return told[j]; });  // plain-words: ok
        page.say<LOG_MODE_PROBABILITY, K, K>(0, [&](int j) { return log_pi[j] - step; });
    }
    return step;
}

// ----------------------------------------------------------------------------------------------- all steps of a target
DEVICE void begin(Beliefs& x, const Problem& problem, long long target) {
    constexpr int S = STATE;
    const Number* mean = place(problem.mean, target, 0);
    const Number* covariance = place(problem.covariance, target, 0);
    const Number* log_h = place(problem.log_probability, target, 0);
    x.grown = int(problem.histories);
    BY_MODE for (int i = 0; i < (DEPTH == 1 ? 1 : x.histories()); ++i) {
        UNROLLED for (int a = 0; a < S; ++a) x.of[i].mean[a] = read(mean + i * S + a);
        UNROLLED for (int a = 0; a < S; ++a)
            UNROLLED for (int c = 0; c <= a; ++c) x.of[i].covariance[at(a, c)] = read(covariance + (i * S + a) * S + c);
    }
    BY_MODE for (int i = 0; i < x.histories(); ++i) x.h[i] = exp(x.log_h[i] = read(log_h + i));
}

DEVICE Model model_at(const Problem& problem, long long target, long long time) {
    return {place(problem.transition, target, time), place(problem.F, target, time), place(problem.Q, target, time),
            place(problem.H, target, time),          place(problem.R, target, time), place(problem.b, target, time),
            place(problem.d, target, time)};
}

DEVICE Observation look_at(const Problem& problem, long long target, long long time) {
    const Number* y = place(problem.observations, target, time);
    Observation look;
    UNROLLED for (int r = 0; r < OBSERVATION; ++r) {
        look.y[r] = read(y + r);
        look.seen[r] = !problem.seen || problem.seen[(target * problem.steps + time) * OBSERVATION + r];
    }
    return look;
}

#ifndef GRADIENTS  // gradients_in_threads.cu follows
extern "C" __global__ void __launch_bounds__(THREADS) filter_all(const __grid_constant__ Problem problem) {
    constexpr int S = STATE;
    __shared__ Number stage[THREADS * WIDTH];
    const int lane = threadIdx.x % LANES;
    const long long own = (long long)blockIdx.x * THREADS + threadIdx.x;
    const long long target = own < problem.targets ? own : problem.targets - 1;  // all lanes of a warp write together
    Number* own_stage = stage + (threadIdx.x - lane) * WIDTH;
    Page page{problem, own_stage, own - lane, problem.steps - problem.first_reported, 0, lane, false};
    Beliefs x;
    begin(x, problem, target);
    Number total = read(place(problem.log_likelihood, target, 0));
    bool is_finite = true;
    ROLLED for (long long time = 0; time < problem.steps; ++time) {
        page.time = time - problem.first_reported;
        page.open = page.time >= 0;
        const Model model = model_at(problem, target, time);
        const Observation look = look_at(problem, target, time);
        Number step;
        if constexpr (DEPTH == 0) step = advance_imm(x, model, look, page, is_finite);
        if constexpr (DEPTH == 1) step = advance_gpb1(x, model, look, page, is_finite);
        if constexpr (DEPTH >= 2) step = advance_gpb(x, model, look, page, is_finite);
        is_finite = is_finite && fabs(step) < FINITE;
        total += step;
        if (page.open) {
            page.say<MEAN, COVARIANCE, 1>(0, DEPTH == 1 ? x.of[0] : collapse(x.h, x.of, x.histories()));
            page.say<STEP_LOG_LIKELIHOOD, 1, 1>(0, [&](int) { return step; });
        }
    }
    if (!is_finite) *problem.failed = 1;
    const int gaussians = DEPTH == 1 ? 1 : x.histories();
    BY_MODE for (int i = 0; i < gaussians; ++i) {
        const Gaussian<S>& end = x.of[i];
        page.put<S>(problem.new_mean + i * S, gaussians * S, [&](int n) { return end.mean[n]; });
        page.put<S * S>(problem.new_covariance + i * S * S, gaussians * S * S,
                        [&](int n) { return end.covariance[at(n / S, n % S)]; });
    }
    BY_MODE for (int i = 0; i < x.histories(); ++i)
        page.put<1>(problem.new_log_probability + i, x.histories(), [&](int) { return x.log_h[i]; });
    page.put<1>(problem.new_log_likelihood, 1, [&](int) { return total; });
}
#endif
