// SaPE2's codes and attention on a CPU, forward and backward, in float and double. `cpp_build.py` compiles this file,
// `cpp_operators.py` makes operators of it.
//
// Both work on tiles with a row for each key and a lane for each query. So softmax and sums of gates go down the rows,
// a vector of queries at a time, and nothing is summed across lanes. Queries come in blocks, so small that their tiles
// stay in a cache from the logits to the last gradient.
//
// Each thread works on heads of its own, or in the forward pass of the attention on blocks. So there is one parallel
// region a call, and results do not depend on the number of threads.

#ifdef __clang__  // It links its own OpenMP. Torch's, which is GCC's, would tell each of its threads to do everything.
#error "timm-sape needs g++ here: set CXX=g++"
#endif

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/vec.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <initializer_list>
#include <limits>
#include <new>
#include <numeric>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using at::vec::fmadd;
template <typename T>
using Vec = at::vec::Vectorized<T>;
template <typename T>
constexpr int64_t LANES = Vec<T>::size();

// Tokens in a block. With fewer, k, v and the codes would be read more often: on a Xeon, with 16 queries, a forward
// pass of 4096 tokens took 1.8 times as long.
constexpr int64_t BLOCK = 64;
constexpr int64_t PART = 128;  // the most numbers that are added one after the other

// Numbers whose first is at the start of a cache line. A vector of 64 bytes across two lines takes twice as long to
// read.
template <typename T>
struct Aligned {
  using value_type = T;
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(64))); }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
  bool operator==(const Aligned&) const { return true; }
  bool operator!=(const Aligned&) const { return false; }
};
template <typename T>
using Numbers = std::vector<T, Aligned<T>>;

template <typename T>
int64_t padded(int64_t n) {
  return (n + LANES<T> - 1) / LANES<T> * LANES<T>;
}

// ------------------------------------------------------------------------------------------------ matrices

template <typename T>
struct Matrix {
  T* p;
  int64_t row, column = 1;  // numbers from one row to the next, and from one column to the next

  Matrix(T* p, int64_t row, int64_t column = 1) : p(p), row(row), column(column) {}
  Matrix(Numbers<std::remove_const_t<T>>& numbers, int64_t row) : p(numbers.data()), row(row) {}
  // A head of [B, h, N, d], counted through all images.
  Matrix(const Tensor& t, int64_t head) : row(t.stride(2)) {
    if constexpr (std::is_const_v<T>) {
      p = t.const_data_ptr<std::remove_const_t<T>>();
    } else {
      p = t.mutable_data_ptr<T>();
    }
    p += head / t.size(1) * t.stride(0) + head % t.size(1) * t.stride(1);
  }
  operator Matrix<const T>() const { return {p, row, column}; }

  T* operator[](int64_t i) const { return p + i * row; }
  Matrix from(int64_t first, int64_t step = 1) const { return {p + first * row, step * row, column}; }
  Matrix transposed() const { return {p, column, row}; }
};

// A head of [B, h, N, d] with its rows one after the other, copied to `memory` unless they are so few that each is read
// once. In a tensor of all heads they may be so far apart that not many of them fit into a cache together.
template <typename T>
Matrix<const T> packed(const Tensor& tensor, int64_t head, Numbers<T>& memory) {
  const Matrix<const T> from(tensor, head);
  const int64_t rows = tensor.size(2), dim = tensor.size(3);
  if (rows <= BLOCK || from.row == dim) return from;
  memory.resize(rows * dim);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t c = 0; c < dim; c += LANES<T>) Vec<T>::loadu(from[i] + c).store(&memory[i * dim + c]);
  }
  return {memory.data(), dim};
}

// Call f(M, i) for M rows from i on: six at a time, the rest two at a time and alone. M is known to the compiler.
template <typename F>
void by_rows(int64_t count, F f) {
  int64_t i = 0;
  for (; i + 6 <= count; i += 6) f(std::integral_constant<int, 6>(), i);
  for (; i + 2 <= count; i += 2) f(std::integral_constant<int, 2>(), i);
  for (; i < count; ++i) f(std::integral_constant<int, 1>(), i);
}

// M rows and N vectors of c (+)= a b, in registers; K is the length of the sums.
template <int M, int N, typename T>
void product_tile(int64_t K, Matrix<const T> a, Matrix<const T> b, Matrix<T> c, bool add) {
  Vec<T> sum[M][N];
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) sum[m][n] = Vec<T>(0);
  }
  for (int64_t k = 0; k < K; ++k) {
    Vec<T> row[N];
    for (int n = 0; n < N; ++n) row[n] = Vec<T>::loadu(b[k] + n * LANES<T>);
    for (int m = 0; m < M; ++m) {
      const Vec<T> x(a[m][k * a.column]);
      for (int n = 0; n < N; ++n) sum[m][n] = fmadd(x, row[n], sum[m][n]);
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) {
      T* to = c[m] + n * LANES<T>;
      (add ? Vec<T>::loadu(to) + sum[m][n] : sum[m][n]).store(to);
    }
  }
}

// c [M, N] (+)= a [M, K] b [K, N]. N is a multiple of the lanes, and columns of b and c are contiguous. Sums are made
// of parts, or their rounding errors would grow with their length.
template <typename T>
void product(int64_t M, int64_t N, int64_t K, Matrix<const T> a, Matrix<const T> b, Matrix<T> c, bool add = false) {
  constexpr int MOST = sizeof(Vec<T>) == 64 ? 4 : 2;  // a tile and a row of b must fit into 32 registers, or 16
  for (int64_t k = 0; k < K; k += PART) {
    const auto columns = [&](auto vectors, int64_t n) {
      by_rows(M, [&](auto rows, int64_t m) {
        product_tile<rows, vectors, T>(
            std::min(PART, K - k), {a[m] + k * a.column, a.row, a.column}, {b[k] + n, b.row}, {c[m] + n, c.row},
            add || k > 0);
      });
    };
    int64_t n = 0;
    for (; n + MOST * LANES<T> <= N; n += MOST * LANES<T>) columns(std::integral_constant<int, MOST>(), n);
    for (; n + 2 * LANES<T> <= N; n += 2 * LANES<T>) columns(std::integral_constant<int, 2>(), n);
    for (; n < N; n += LANES<T>) columns(std::integral_constant<int, 1>(), n);
  }
}

// A sum for i from `first` on, in steps, also in parts. f(i, part) adds to a part.
template <typename T, typename F>
Vec<T> sum_of(int64_t first, int64_t end, int64_t step, F f) {
  Vec<T> sum(0);
  for (int64_t i = first; i < end;) {
    Vec<T> part(0);
    for (const int64_t stop = std::min(end, i + PART * step); i < stop; i += step) part = f(i, part);
    sum = sum + part;
  }
  return sum;
}

// The sum of the first numbers of a vector.
template <typename T>
T total(Vec<T> x, int64_t count) {
  std::array<T, LANES<T>> numbers;
  x.store(numbers.data());
  return std::accumulate(numbers.begin(), numbers.begin() + std::min(count, LANES<T>), T(0));
}

// to [columns, width] = factor * from [rows, columns] transposed; zero where there is no row. Columns and width are
// multiples of the lanes. Interleaving the halves of a square block of vectors shifts the bits of its indices by one,
// so as many rounds as an index has bits swap rows and columns.
template <typename T>
void transpose(Matrix<const T> from, int64_t rows, int64_t columns, T factor, T* to, int64_t width) {
  constexpr int64_t L = LANES<T>;
  for (int64_t i = 0; i < width; i += L) {
    for (int64_t c = 0; c < columns; c += L) {
      Vec<T> x[L], y[L];
      for (int64_t m = 0; m < L; ++m) x[m] = i + m < rows ? Vec<T>::loadu(from[i + m] + c) * Vec<T>(factor) : Vec<T>(0);
#pragma GCC unroll 4
      for (int64_t round = 1; round < L; round *= 2) {
        for (int64_t m = 0; m < L / 2; ++m) std::tie(y[2 * m], y[2 * m + 1]) = at::vec::interleave2(x[m], x[m + L / 2]);
        std::copy_n(y, L, x);
      }
      for (int64_t m = 0; m < L; ++m) x[m].store(to + (c + m) * width + i);
    }
  }
}

// ------------------------------------------------------------------------------------------------ roots

// The square root of x, 0 where x <= limit. The limit is finite and at least 0.
template <typename T>
Vec<T> root_above(Vec<T> x, Vec<T> limit) {
  return Vec<T>::blendv(x, Vec<T>(0), x <= limit).sqrt();
}

// a / b, 0 where b is 0.
template <typename T>
Vec<T> divided(Vec<T> a, Vec<T> b) {
  return Vec<T>::blendv(a / b, Vec<T>(0), b == Vec<T>(0));
}

#ifdef CPU_CAPABILITY_AVX512
// On a Xeon a root or quotient of 16 numbers takes as long as about 20 products. An approximation with 14 bits takes as
// long as four, and one step of Newton's method makes it 28 bits. Where something is infinite that step gives NaN, and
// the result is that of the approximation.
template <>
Vec<float> root_above(Vec<float> x, Vec<float> limit) {
  const __m512 inverse = _mm512_rsqrt14_ps(x), root = _mm512_mul_ps(x, inverse);
  const __m512 missing = _mm512_fnmadd_ps(root, root, x), half = _mm512_mul_ps(inverse, _mm512_set1_ps(0.5f));
  const __m512 refined = _mm512_fmadd_ps(missing, half, root);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(refined, refined, _CMP_UNORD_Q);
  const __mmask16 above = _mm512_cmp_ps_mask(x, limit, _CMP_NLE_UQ);  // NaN as well
  return _mm512_maskz_mov_ps(above, _mm512_mask_mov_ps(refined, is_nan, x));  // infinity is its own root
}

template <>
Vec<float> divided(Vec<float> a, Vec<float> b) {
  const __m512 inverse = _mm512_rcp14_ps(b), quotient = _mm512_mul_ps(a, inverse);
  const __m512 refined = _mm512_fmadd_ps(_mm512_fnmadd_ps(quotient, b, a), inverse, quotient);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(refined, refined, _CMP_UNORD_Q);
  const __mmask16 not_zero = _mm512_cmp_ps_mask(b, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  return _mm512_maskz_mov_ps(not_zero, _mm512_mask_mov_ps(refined, is_nan, quotient));
}
#endif

// ------------------------------------------------------------------------------------------------ distances

// The codes of a head along one axis, and those of a block of tokens, which are the lanes.
template <typename T>
struct Codes {
  int64_t channels, row;
  Numbers<T> codes, noise;  // [N, row], [N]: zero for prefix tokens; squared distances up to the noise are 0
  Numbers<T> lane_codes, lane_noise;  // [row, width], [width]
  Numbers<T> distances;  // of a block of rows to the lanes, and then the gradients divided by them
  Numbers<T> grad_rows, grad_lanes;  // [N, row]: the gradient of the codes is their difference

  void load(const Tensor& tensor, int64_t head, int64_t N) {
    channels = tensor.size(3), row = padded<T>(channels);
    codes.assign(N * row, T(0));
    noise.assign(N, T(0));
    const T floor = 64 * std::numeric_limits<T>::epsilon();
    const Matrix<const T> from = Matrix<const T>(tensor, head).from(tensor.size(2) - N);  // from the first patch on
    for (int64_t i = N - tensor.size(2); i < N; ++i) {
      std::copy_n(from[i], channels, &codes[i * row]);
      const auto square = [floor](T a, T b) { return floor * a * (floor * b); };  // a * b may overflow
      const T squares = std::inner_product(from[i], from[i] + channels, from[i], T(0), std::plus<T>(), square);
      noise[i] = std::min(squares, std::numeric_limits<T>::max());  // a distance of inf is no noise
    }
  }

  // The block of n tokens from i on.
  void load_lanes(int64_t i, int64_t n, int64_t width) {
    lane_codes.resize(row * width);
    transpose<T>({&codes[i * row], row}, n, row, 1, lane_codes.data(), width);
    lane_noise.assign(width, T(0));
    std::copy_n(&noise[i], n, lane_noise.data());
  }

  // Distances of M tokens from j on to a vector of lanes, from differences: products would lose the small ones.
  template <int M>
  void distances_of(int64_t j, int64_t lane, int64_t width, Vec<T> (&d)[M]) const {
    for (int m = 0; m < M; ++m) d[m] = Vec<T>(0);
    for (int64_t c = 0; c < channels; ++c) {
      const Vec<T> x = Vec<T>::loadu(&lane_codes[c * width + lane]);
      for (int m = 0; m < M; ++m) {
        const Vec<T> difference = x - Vec<T>(codes[(j + m) * row + c]);
        d[m] = fmadd(difference, difference, d[m]);
      }
    }
    const Vec<T> limit = Vec<T>::loadu(&lane_noise[lane]);
    for (int m = 0; m < M; ++m) d[m] = root_above(d[m], at::vec::maximum(limit, Vec<T>(noise[j + m])));
  }

  // `distances` now holds R. Add R_ji (w_j - w_i) to the gradients of the rows j and of the lanes i.
  void add_gradients(int64_t first_row, int64_t rows, int64_t first_lane, int64_t lanes, int64_t width) {
    const int64_t row = this->row;
    // copied to locals, because the compiler must assume that a store changes members
    by_rows(rows, [&, codes = codes.data(), distances = distances.data(), grad_lanes = grad_lanes.data()](
                      auto M, int64_t j) {
      for (int64_t c = 0; c < row; c += LANES<T>) {
        Vec<T> w[M], sum[M];
        for (int m = 0; m < M; ++m) w[m] = Vec<T>::loadu(codes + (first_row + j + m) * row + c), sum[m] = Vec<T>(0);
        const T *x_i = codes + first_lane * row + c, *r_i = distances + j * width;
        T* to = grad_lanes + first_lane * row + c;
        for (int64_t i = 0; i < lanes; ++i, x_i += row, to += row, ++r_i) {
          const Vec<T> x = Vec<T>::loadu(x_i);
          Vec<T> sum_i = Vec<T>::loadu(to);
          for (int m = 0; m < M; ++m) {
            const Vec<T> difference = w[m] - x, r(r_i[m * width]);
            sum[m] = fmadd(difference, r, sum[m]);
            sum_i = fmadd(difference, r, sum_i);
          }
          sum_i.store(to);
        }
        for (int m = 0; m < M; ++m) {
          T* to = &grad_rows[(first_row + j + m) * row + c];
          (Vec<T>::loadu(to) + sum[m]).store(to);
        }
      }
    });
  }

  void store_gradient(const Tensor& tensor, int64_t head, T gain) const {
    const Matrix<T> to(tensor, head);
    int64_t at = grad_rows.size() - tensor.size(2) * row;  // prefix tokens have no codes
    for (int64_t i = 0; i < tensor.size(2); ++i, at += row) {
      for (int64_t c = 0; c < channels; ++c) to[i][c] = gain * (grad_rows[at + c] - grad_lanes[at + c]);
    }
  }
};

// Call f(at, dx, dy) with the distances of tokens j + 0 ... j + rows - 1 to those of the block of i, for each vector of
// the lanes; `at` is its place in [rows, width]. Distances to prefix tokens are 0.
template <typename T, typename F>
void each_distance(
    const Codes<T>& x, const Codes<T>& y, int64_t prefix, int64_t j, int64_t rows, int64_t i, int64_t width, F f) {
  const int64_t skipped = std::clamp<int64_t>(prefix - j, 0, rows);
  for (int64_t at = 0; at < skipped * width; at += LANES<T>) f(at, Vec<T>(0), Vec<T>(0));
  by_rows(rows - skipped, [&](auto M, int64_t row) {
    row += skipped;
    for (int64_t lane = 0; lane < width; lane += LANES<T>) {
      // bits that turn everything into 0 for prefix tokens, NaN as well
      const Vec<T> patches = Vec<T>::arange(T(i + lane), T(1)) >= Vec<T>(T(prefix));
      Vec<T> dx[M], dy[M];
      x.distances_of(j + row, lane, width, dx);
      y.distances_of(j + row, lane, width, dy);
      for (int m = 0; m < M; ++m) f((row + m) * width + lane, dx[m] & patches, dy[m] & patches);
    }
  });
}

// ------------------------------------------------------------------------------------------------ attention

// e^x. Smaller exponentials, below 1e-31 in float, are 0. They and their products could be subnormal numbers, and with
// these a backward pass took 15 times as long.
template <typename T>
Vec<T> exponential(Vec<T> x) {
  const Vec<T> least(std::log(1e7 * std::numeric_limits<T>::min()));
  return Vec<T>::blendv(x.exp(), Vec<T>(0), x < least);
}

// The kernels read and write by these sizes, so what does not fit must not get that far.
void check_tokens(const Tensor& q, std::initializer_list<Tensor> others) {
  TORCH_CHECK(q.dim() == 4, "q must be [B, h, N, d], got ", q.sizes());
  for (const Tensor& t : others) {
    TORCH_CHECK(
        t.sizes() == q.sizes() && t.scalar_type() == q.scalar_type(), "tensors of tokens must be alike, got ",
        q.sizes(), " of ", q.scalar_type(), " and ", t.sizes(), " of ", t.scalar_type());
  }
}

void check_codes(const Tensor& q, int64_t least, int64_t most, const Tensor& codes, int64_t entries) {
  TORCH_CHECK(
      codes.dim() == 4 && codes.size(0) == q.size(0) && codes.size(1) == q.size(1) && codes.size(2) >= least &&
          codes.size(2) <= most && codes.size(3) == entries && codes.scalar_type() == q.scalar_type() &&
          (codes.stride(3) == 1 || codes.size(3) < 2 || codes.numel() == 0),
      "codes must be [B, h, N-P, C] with a last stride of 1 for q of ", q.sizes(), " and ", q.scalar_type(), ", got ",
      codes.sizes(), " with strides of ", codes.strides(), " and ", codes.scalar_type());
}

void check_rows(const Tensor& q, std::initializer_list<Tensor> others) {
  for (const Tensor& t : others) {
    TORCH_CHECK(
        t.sizes() == q.sizes().slice(0, 3) && t.is_contiguous() && t.scalar_type() == q.scalar_type(),
        "there must be one number of ", q.scalar_type(), " for each query, got ", t.sizes(), " of ", t.scalar_type());
  }
}

void check_attention(const Tensor& q, const Tensor& codes_x, const Tensor& codes_y, const Tensor& gain) {
  for (const Tensor& codes : {codes_x, codes_y}) check_codes(q, 0, q.size(2), codes, codes.size(-1));
  TORCH_CHECK(codes_x.size(2) == codes_y.size(2), "codes of ", codes_x.size(2), " and ", codes_y.size(2), " patches");
  TORCH_CHECK(
      gain.numel() == q.size(1) && gain.is_contiguous() && gain.scalar_type() == q.scalar_type(),
      "gain must have one value for each head");
}

void attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& codes_x, const Tensor& codes_y, const Tensor& gain,
    double scale, const Tensor& out, const Tensor& row_max, const Tensor& row_sum) {
  check_tokens(q, {k, v, out});
  check_attention(q, codes_x, codes_y, gain);
  check_rows(q, {row_max, row_sum});
  const int64_t heads = q.size(0) * q.size(1), N = q.size(2), dim = q.size(3), prefix = N - codes_x.size(2);
  const int64_t blocks = (N + BLOCK - 1) / BLOCK;
  AT_DISPATCH_FLOATING_TYPES(q.scalar_type(), "attention", [&] {
    using T = scalar_t;
    at::parallel_for(0, heads * blocks, 1, [&](int64_t begin, int64_t end) {
      Codes<T> x, y;
      Matrix<const T> ks{nullptr, 0}, vs{nullptr, 0};
      Numbers<T> keys, values, queries(dim * BLOCK), tile(N * BLOCK);  // the latter two [d, width] and [N, width]
      for (int64_t task = begin; task < end; ++task) {
        const int64_t head = task / blocks, i = task % blocks * BLOCK, n = std::min(BLOCK, N - i), width = padded<T>(n);
        if (task == begin || i == 0) {
          x.load(codes_x, head, N), y.load(codes_y, head, N);
          ks = packed(k, head, keys), vs = packed(v, head, values);
        }
        x.load_lanes(i, n, width), y.load_lanes(i, n, width);
        transpose<T>(Matrix<const T>(q, head).from(i), n, dim, scale, queries.data(), width);
        product<T>(N, width, dim, ks, {queries, width}, {tile, width});
        const Vec<T> factor(gain.const_data_ptr<T>()[head % q.size(1)]);
        each_distance(x, y, prefix, 0, N, i, width, [&](int64_t at, Vec<T> dx, Vec<T> dy) {
          fmadd(dx + dy, factor, Vec<T>::loadu(&tile[at])).store(&tile[at]);
        });
        for (int64_t lane = 0; lane < width; lane += LANES<T>) {
          Vec<T> top(-std::numeric_limits<T>::infinity());  // may miss NaN, which the sum will not
          for (int64_t at = lane; at < N * width; at += width) top = at::vec::clamp_min(top, Vec<T>::loadu(&tile[at]));
          const Vec<T> sum = sum_of<T>(lane, N * width, width, [&](int64_t at, Vec<T> part) {
            const Vec<T> e = exponential(Vec<T>::loadu(&tile[at]) - top);
            e.store(&tile[at]);
            return part + e;
          });
          const int64_t count = std::min(LANES<T>, n - lane), row = head * N + i + lane;
          top.store(row_max.mutable_data_ptr<T>() + row, count);
          sum.store(row_sum.mutable_data_ptr<T>() + row, count);
          const Vec<T> inverse = Vec<T>(1) / sum;
          for (int64_t at = lane; at < N * width; at += width) (Vec<T>::loadu(&tile[at]) * inverse).store(&tile[at]);
        }
        const Matrix<T> p(tile, width);
        product<T>(n, dim, N, p.transposed(), vs, Matrix<T>(out, head).from(i));
      }
    });
  });
}

// A head in the backward pass, and what a thread needs for it.
template <typename T>
struct Backward {
  int64_t N, dim;
  T gain;
  Matrix<const T> q, k, v, grad;
  Matrix<T> grad_q, grad_k, grad_v;  // of q and k without the scale
  Numbers<T> queries, grads;  // of each block [d, width]: q times the scale, and the gradients of the output
  Numbers<T> top, inverse, delta;  // [N]: the largest logit, 1 / the sum of exponentials, the sum of p times dp
  Numbers<T> sum_ds, sum_pd;  // [N]: sums over the keys of ds, and of p times the distances
  Numbers<T> p;  // [rows, width]
  double gain_sum = 0;

  void load(Matrix<const T> out, const T* row_max, const T* row_sum, T scale) {
    const int64_t size = padded<T>(N);
    for (Numbers<T>* numbers : {&queries, &grads}) numbers->resize(dim * size);
    for (Numbers<T>* numbers : {&top, &inverse, &delta, &sum_ds, &sum_pd}) numbers->assign(size, T(0));
    Numbers<T> outs(dim * BLOCK);  // of a block [d, width]
    for (int64_t i = 0; i < N; i += BLOCK) {
      const int64_t n = std::min(BLOCK, N - i), width = padded<T>(n);
      transpose<T>(q.from(i), n, dim, scale, &queries[i * dim], width);
      transpose<T>(grad.from(i), n, dim, 1, &grads[i * dim], width);
      transpose<T>(out.from(i), n, dim, 1, outs.data(), width);
      for (int64_t lane = 0; lane < width; lane += LANES<T>) {
        // In the order of `product`: where one probability is 1, this is its dp to the last digit, and its ds is 0.
        sum_of<T>(lane, dim * width, width, [&](int64_t at, Vec<T> part) {
          return fmadd(Vec<T>::loadu(&outs[at]), Vec<T>::loadu(&grads[i * dim + at]), part);
        }).store(&delta[i + lane]);
      }
    }
    for (int64_t i = 0; i < N; ++i) top[i] = row_max[i], inverse[i] = 1 / row_sum[i];
  }

  // Keys from j on as rows, the block of queries from i on as lanes: the gradients ds of their logits, and what follows
  // from them and from the probabilities. `both`: the sums of their distances, [rows, width]. Gradients of a block are
  // written when it meets the first block, and added to afterwards. So that pair comes first.
  void add_tile(int64_t j, int64_t rows, int64_t i, int64_t n, const T* both, Numbers<T>& ds) {
    const int64_t width = padded<T>(n);
    product<T>(rows, width, dim, k.from(j), {&queries[i * dim], width}, {p, width});
    product<T>(rows, width, dim, v.from(j), {&grads[i * dim], width}, {ds, width});
    for (int64_t lane = 0; lane < width; lane += LANES<T>) {
      const Vec<T> top = Vec<T>::loadu(&this->top[i + lane]), inverse = Vec<T>::loadu(&this->inverse[i + lane]);
      const Vec<T> delta = Vec<T>::loadu(&this->delta[i + lane]);
      Vec<T> sum(0), ds_of_lanes(0), pd_of_lanes(0);
      for (int64_t at = lane; at < rows * width; at += width) {
        const Vec<T> d = Vec<T>::loadu(both + at), logit = fmadd(d, Vec<T>(gain), Vec<T>::loadu(&p[at]));
        const Vec<T> probability = exponential(logit - top) * inverse;
        const Vec<T> gradient = probability * (Vec<T>::loadu(&ds[at]) - delta);
        probability.store(&p[at]);
        gradient.store(&ds[at]);
        sum = fmadd(gradient, d, sum);
        ds_of_lanes = ds_of_lanes + gradient;
        pd_of_lanes = fmadd(probability, d, pd_of_lanes);
      }
      gain_sum += total(sum, n - lane);  // what follows may be NaN
      (Vec<T>::loadu(&sum_ds[i + lane]) + ds_of_lanes).store(&sum_ds[i + lane]);
      (Vec<T>::loadu(&sum_pd[i + lane]) + pd_of_lanes).store(&sum_pd[i + lane]);
    }
    const Matrix<T> probabilities(p, width), gradients(ds, width);
    product<T>(rows, dim, n, probabilities, grad.from(i), grad_v.from(j), i > 0);
    product<T>(rows, dim, n, gradients, q.from(i), grad_k.from(j), i > 0);
    product<T>(n, dim, rows, gradients.transposed(), k.from(j), grad_q.from(i), j > 0);
  }

  // The sum of ds times the distances. The sum of ds over the keys is 0, but for the rounding of the output, from which
  // `delta` was computed. Distances are positive, so in this sum, where they do not cancel, such errors would add up.
  T grad_gain() const { return gain_sum - std::inner_product(sum_ds.begin(), sum_ds.begin() + N, sum_pd.begin(), 0.0); }
};

// The gradient of a logit, divided by the distance D, is R. That of code w_i is the gain times the sum over j of
// (R_ij + R_ji) (w_i - w_j). Such a sum of differences loses no digits where D is small. The gain comes last, because R
// times it may be too large for a number.
//
// D_ij = D_ji. So each pair of blocks comes once, for the queries of one and the keys of the other and vice versa.
void attention_backward(
    const Tensor& grad, const Tensor& out, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& row_max,
    const Tensor& row_sum, const Tensor& codes_x, const Tensor& codes_y, const Tensor& gain, double scale,
    const Tensor& grad_q, const Tensor& grad_k, const Tensor& grad_v, const Tensor& grad_x, const Tensor& grad_y,
    const Tensor& grad_gain) {
  check_tokens(q, {grad, out, k, v, grad_q, grad_k, grad_v});
  check_rows(q, {row_max, row_sum});
  check_attention(q, codes_x, codes_y, gain);
  check_codes(q, codes_x.size(2), codes_x.size(2), grad_x, codes_x.size(3));
  check_codes(q, codes_y.size(2), codes_y.size(2), grad_y, codes_y.size(3));
  const int64_t heads = q.size(0) * q.size(1), N = q.size(2), dim = q.size(3), prefix = N - codes_x.size(2);
  AT_DISPATCH_FLOATING_TYPES(q.scalar_type(), "attention_backward", [&] {
    using T = scalar_t;
    at::parallel_for(0, heads, 1, [&](int64_t begin, int64_t end) {
      Codes<T> x, y;
      Numbers<T> memory[4];
      Numbers<T> both(BLOCK * BLOCK), ds(BLOCK * BLOCK), other_ds(BLOCK * BLOCK), turned(BLOCK * BLOCK);
      for (Codes<T>* codes : {&x, &y}) codes->distances.resize(BLOCK * BLOCK);
      for (int64_t head = begin; head < end; ++head) {
        const T factor = gain.const_data_ptr<T>()[head % q.size(1)];
        Backward<T> tiles{
            N, dim, factor, packed(q, head, memory[0]), packed(k, head, memory[1]), packed(v, head, memory[2]),
            packed(grad, head, memory[3]), {grad_q, head}, {grad_k, head}, {grad_v, head}};
        tiles.p.resize(BLOCK * BLOCK);
        tiles.load({out, head}, row_max.const_data_ptr<T>() + head * N, row_sum.const_data_ptr<T>() + head * N, scale);
        x.load(codes_x, head, N), y.load(codes_y, head, N);
        for (Codes<T>* codes : {&x, &y}) {
          codes->grad_rows.assign(codes->codes.size(), T(0));
          codes->grad_lanes.assign(codes->codes.size(), T(0));
        }
        for (int64_t i = 0; i < N; i += BLOCK) {
          const int64_t n = std::min(BLOCK, N - i), width = padded<T>(n);
          x.load_lanes(i, n, width), y.load_lanes(i, n, width);
          for (int64_t j = i; j < N; j += BLOCK) {
            const int64_t rows = std::min(BLOCK, N - j), other_width = padded<T>(rows);
            each_distance(x, y, prefix, j, rows, i, width, [&](int64_t at, Vec<T> dx, Vec<T> dy) {
              dx.store(&x.distances[at]);
              dy.store(&y.distances[at]);
              (dx + dy).store(&both[at]);
            });
            tiles.add_tile(j, rows, i, n, both.data(), ds);
            if (j > i) {
              transpose<T>({both, width}, rows, width, 1, turned.data(), other_width);
              tiles.add_tile(i, n, j, rows, turned.data(), other_ds);
              transpose<T>({other_ds, other_width}, n, other_width, 1, turned.data(), width);
              for (int64_t at = 0; at < rows * width; at += LANES<T>) {
                (Vec<T>::loadu(&ds[at]) + Vec<T>::loadu(&turned[at])).store(&ds[at]);
              }
            }
            for (Codes<T>* codes : {&x, &y}) {
              for (int64_t at = 0; at < rows * width; at += LANES<T>) {
                divided(Vec<T>::loadu(&ds[at]), Vec<T>::loadu(&codes->distances[at])).store(&codes->distances[at]);
              }
              codes->add_gradients(j, rows, i, n, width);
            }
          }
        }
        for (const Matrix<T>& m : {tiles.grad_q, tiles.grad_k}) {
          for (int64_t i = 0; i < N; ++i) {
            for (int64_t c = 0; c < dim; c += LANES<T>) (Vec<T>::loadu(m[i] + c) * Vec<T>(scale)).store(m[i] + c);
          }
        }
        x.store_gradient(grad_x, head, factor);
        y.store_gradient(grad_y, head, factor);
        grad_gain.mutable_data_ptr<T>()[head] = tiles.grad_gain();
      }
    });
  });
}

// ------------------------------------------------------------------------------------------------ codes

// The lines of a grid along one axis, their tensors, and what a thread needs for them.
template <typename T>
struct Lines {
  Tensor table, codes, grad_table;  // codes: or their gradients; grad_table: in the backward pass, for each head
  int64_t count, length, next, step;  // next: patches from one line to the next, step: from one token of it to the next
  int64_t npos, row, width;
  T shrink;
  Numbers<T> table_t;  // [d, row]
  Numbers<T> queries;  // [d, width]
  Numbers<T> gates, positions, cells, parts, grads;  // keys x queries, [length, width]
  Numbers<T> values[2], grad_values[2];  // of each source at integer positions, [G, row]

  Lines(Tensor table, Tensor codes, Tensor grad_table, int64_t count, int64_t length, bool rows, double shrink)
      : table(table), codes(codes), grad_table(grad_table), count(count), length(length), next(rows ? length : 1),
        step(rows ? 1 : count), npos(table.size(0)), row(padded<T>(npos)), width(padded<T>(length)), shrink(shrink) {
    table_t.resize(table.size(1) * row);
    transpose<T>({table.const_data_ptr<T>(), table.stride(0)}, npos, table.size(1), 1, table_t.data(), row);
  }

  void load_values(const std::vector<Matrix<const T>>& sources, int64_t dim) {
    for (size_t s = 0; s < sources.size(); ++s) {
      values[s].resize(count * length * row);
      product<T>(count * length, row, dim, sources[s], {table_t, row}, {values[s], row});
    }
  }

  // Gates and scaled positions of a line, the cell of the table where each position is, and how far in the cell.
  void load(Matrix<const T> q, Matrix<const T> k, int64_t dim, T gate_scale) {
    queries.resize(dim * width);
    transpose<T>(q, length, dim, -gate_scale, queries.data(), width);
    for (Numbers<T>* numbers : {&gates, &positions, &cells, &parts}) numbers->resize(length * width);
    product<T>(length, width, dim, k, {queries, width}, {gates, width});
    for (int64_t lane = 0; lane < width; lane += LANES<T>) {
      Vec<T> sum(0), lost(0);  // Kahan's sum: of a position all digits are needed, for it selects a cell
      for (int64_t at = (length - 1) * width + lane; at >= 0; at -= width) {
        const Vec<T> gate = Vec<T>(1) / (Vec<T>(1) + Vec<T>::loadu(&gates[at]).exp());
        const Vec<T> next = gate - lost, total = sum + next;
        lost = (total - sum) - next;
        sum = total;
        const Vec<T> position = sum * Vec<T>(shrink), last(npos - 1), zero(0);
        const Vec<T> cell = Vec<T>::blendv(zero, position.floor(), position > zero);  // 0 for NaN
        const Vec<T> inside = at::vec::clamp_max(cell, Vec<T>(npos - 2));
        gate.store(&gates[at]);
        position.store(&positions[at]);
        inside.store(&cells[at]);
        (Vec<T>::blendv(position, last, position > last) - inside).store(&parts[at]);
      }
    }
  }
};

template <typename T>
std::vector<Matrix<T>> sources_of(const std::string& mode, Matrix<T> q, Matrix<T> k) {
  return mode == "q" ? std::vector{q} : mode == "k" ? std::vector{k} : std::vector{q, k};
}

void check_lines(
    const Tensor& q, const Tensor& table_x, const Tensor& table_y, int64_t height, int64_t width,
    const std::string& mode, const Tensor& codes_x, const Tensor& codes_y) {
  TORCH_CHECK(
      q.size(2) == height * width, "q and k have ", q.size(2), " patches, and the grid is ", height, "x", width);
  for (const Tensor& table : {table_x, table_y}) {
    TORCH_CHECK(
        table.dim() == 2 && table.size(0) > 1 && table.size(1) == q.size(3) && table.scalar_type() == q.scalar_type(),
        "tables must be [npos, ", q.size(3), "] of ", q.scalar_type(), ", got ", table.sizes(), " of ",
        table.scalar_type());
  }
  const int64_t sources = mode.size();
  check_codes(q, q.size(2), q.size(2), codes_x, sources * width);
  check_codes(q, q.size(2), q.size(2), codes_y, sources * height);
}

void codes(
    const Tensor& q, const Tensor& k, const Tensor& table_x, const Tensor& table_y, int64_t height, int64_t width,
    const std::string& mode, double gate_scale, double shrink_x, double shrink_y, const Tensor& codes_x,
    const Tensor& codes_y) {
  check_tokens(q, {k});
  check_lines(q, table_x, table_y, height, width, mode, codes_x, codes_y);
  AT_DISPATCH_FLOATING_TYPES(q.scalar_type(), "codes", [&] {
    using T = scalar_t;
    at::parallel_for(0, q.size(0) * q.size(1), 1, [&](int64_t begin, int64_t end) {
      Lines<T> rows(table_x, codes_x, {}, height, width, true, shrink_x);
      Lines<T> columns(table_y, codes_y, {}, width, height, false, shrink_y);
      for (int64_t head = begin; head < end; ++head) {
        const Matrix<const T> qs(q, head), ks(k, head);
        const auto sources = sources_of(mode, qs, ks);
        for (Lines<T>* axis : {&rows, &columns}) {
          Lines<T>& lines = *axis;
          const Matrix<T> to(lines.codes, head);
          const T factor = std::sqrt(lines.shrink);
          lines.load_values(sources, q.size(3));
          for (int64_t line = 0; line < lines.count; ++line) {
            const int64_t first = line * lines.next;
            lines.load(qs.from(first, lines.step), ks.from(first, lines.step), q.size(3), gate_scale);
            for (size_t s = 0; s < sources.size(); ++s) {
              for (int64_t j = 0; j < lines.length; ++j) {
                const T *cells = &lines.cells[j * lines.width], *parts = &lines.parts[j * lines.width];
                for (int64_t i = 0, patch = first; i < lines.length; ++i, patch += lines.step) {
                  const T* z = &lines.values[s][patch * lines.row + int64_t(cells[i])];
                  to[patch][s * lines.length + j] = factor * (z[0] + parts[i] * (z[1] - z[0]));
                }
              }
            }
          }
        }
      }
    });
  });
}

// The gradients of q and k are written, or with `onto` added to what is there. Those of the tables are of each head,
// [B * h, npos, d].
void codes_backward(
    const Tensor& grad_x, const Tensor& grad_y, const Tensor& q, const Tensor& k, const Tensor& table_x,
    const Tensor& table_y, int64_t height, int64_t width, const std::string& mode, double gate_scale, double shrink_x,
    double shrink_y, bool onto, const Tensor& grad_q, const Tensor& grad_k, const Tensor& grad_table_x,
    const Tensor& grad_table_y) {
  check_tokens(q, {k, grad_q, grad_k});
  check_lines(q, table_x, table_y, height, width, mode, grad_x, grad_y);
  AT_DISPATCH_FLOATING_TYPES(q.scalar_type(), "codes_backward", [&] {
    using T = scalar_t;
    const int64_t dim = q.size(3);
    at::parallel_for(0, q.size(0) * q.size(1), 1, [&](int64_t begin, int64_t end) {
      Lines<T> rows(table_x, grad_x, grad_table_x, height, width, true, shrink_x);
      Lines<T> columns(table_y, grad_y, grad_table_y, width, height, false, shrink_y);
      for (int64_t head = begin; head < end; ++head) {
        const Matrix<const T> qs(q, head), ks(k, head);
        const Matrix<T> gq(grad_q, head), gk(grad_k, head);
        const auto sources = sources_of(mode, qs, ks);
        const auto grad_sources = sources_of(mode, gq, gk);
        for (Lines<T>* axis : {&rows, &columns}) {
          Lines<T>& lines = *axis;
          const bool add = onto || axis == &columns;
          const Matrix<const T> from(lines.codes, head);
          const T factor = std::sqrt(lines.shrink);
          const int64_t length = lines.length, width = lines.width;
          lines.load_values(sources, dim);
          for (size_t s = 0; s < sources.size(); ++s) lines.grad_values[s].assign(lines.values[s].size(), T(0));
          for (int64_t line = 0; line < lines.count; ++line) {
            const int64_t first = line * lines.next, step = lines.step;
            lines.load(qs.from(first, step), ks.from(first, step), dim, gate_scale);
            lines.grads.assign(length * width, T(0));
            for (size_t s = 0; s < sources.size(); ++s) {
              // consecutive additions go to different patches, and so do not wait for each other
              for (int64_t j = 0; j < length; ++j) {
                const T *cells = &lines.cells[j * width], *parts = &lines.parts[j * width];
                for (int64_t i = 0, patch = first; i < length; ++i, patch += step) {
                  const int64_t at = patch * lines.row + int64_t(cells[i]);
                  const T *z = &lines.values[s][at], g = factor * from[patch][s * length + j];
                  T* grad_z = &lines.grad_values[s][at];
                  grad_z[0] += g * (1 - parts[i]);
                  grad_z[1] += g * parts[i];
                  lines.grads[j * width + i] += g * (z[1] - z[0]);
                }
              }
            }
            for (int64_t lane = 0; lane < width; lane += LANES<T>) {
              Vec<T> sum(0);  // the gate of patch j is part of all positions up to j
              for (int64_t at = lane; at < length * width; at += width) {
                const Vec<T> beyond = Vec<T>::loadu(&lines.positions[at]) >= Vec<T>(lines.npos - 1);
                sum = sum + Vec<T>::blendv(Vec<T>::loadu(&lines.grads[at]), Vec<T>(0), beyond);
                const Vec<T> gate = Vec<T>::loadu(&lines.gates[at]), scale(gate_scale * lines.shrink);
                (sum * gate * (Vec<T>(1) - gate) * scale).store(&lines.grads[at]);
              }
            }
            const Matrix<T> g(lines.grads, width);
            product<T>(length, dim, length, g.transposed(), ks.from(first, step), gq.from(first, step), add);
            product<T>(length, dim, length, g, qs.from(first, step), gk.from(first, step), add);
          }
        }
        for (Lines<T>* axis : {&rows, &columns}) {  // after the gates of rows, which write the gradients anew
          const Matrix<const T> table(axis->table.const_data_ptr<T>(), axis->table.stride(0));
          const Matrix<T> to(axis->grad_table.mutable_data_ptr<T>() + head * axis->npos * dim, dim);
          for (size_t s = 0; s < sources.size(); ++s) {
            const Matrix<T> g(axis->grad_values[s], axis->row);
            product<T>(q.size(2), dim, axis->npos, g, table, grad_sources[s], true);
            product<T>(axis->npos, dim, q.size(2), g.transposed(), sources[s], to, s > 0);
          }
        }
      }
    });
  });
}

} // namespace

TORCH_LIBRARY(timm_sape_cpp, m) {
  m.def("codes", codes);
  m.def("codes_backward", codes_backward);
  m.def("attention", attention);
  m.def("attention_backward", attention_backward);
}
