// oneflow_accel_paged_attention: writes keys and values of new tokens to their sequences' pages, in
// place, and attends to all that the sequences hold.
//
// A page holds 64 tokens of every head: keys (head size, 64), which is the panel that a product
// with queries reads, and values (64, head size). Softmax goes page by page (Milakov and Gimelshein
// 2018, "Online normalizer calculation for softmax"), so that each byte is read once. A token's
// result does not depend on which others are read with it.
#include <cmath>

#include "attention/block_product.h"
#include "common/infer.h"
#include "common/oneflow.h"
#include "common/threads.h"

namespace oneflow_accel::packed {

namespace {

constexpr int64_t kPage = kPanelWidth;
// Tokens of one sequence that go over its pages together.
constexpr int64_t kTokensAtOnce = 16;

struct Sizes {
  int64_t tokens;
  int64_t heads;
  int64_t kv;
  int64_t size;
  int64_t pages;
  int64_t most_pages;

  int64_t width() const { return (heads + 2 * kv) * size; }
  int64_t padded_size() const { return padded(size); }
  int64_t keys_of_page() const { return kv * size * kPage; }
  int64_t values_of_page() const { return kv * kPage * padded_size(); }
};

template <typename View>
Sizes sizes_of(const View& qkv, const View& keys, const View& tables, int64_t heads) {
  return {qkv.At(0), heads, keys.At(1), keys.At(2), keys.At(0), tables.At(1)};
}

Maybe<void> infer_attention(user_op::InferContext* ctx) {
  const auto shape = [=](const char* name) { return ctx->InputShape(name, 0); };
  const Shape qkv = shape("qkv");
  const Shape keys = shape("keys");
  const Shape tables = shape("tables");
  const int64_t heads = ctx->Attr<int32_t>("heads");
  bool fits = qkv.NumAxes() == 2 && keys.NumAxes() == 4 && tables.NumAxes() == 2;
  if (fits) {
    const Sizes n = sizes_of(qkv, keys, tables, heads);
    const Shape tokens({n.tokens});
    const Shape angles({n.tokens, n.size / 2});
    const bool turns = ctx->has_input("cosines", 0);
    fits = n.kv > 0 && heads % n.kv == 0 && qkv.At(1) == n.width() && keys.At(3) == kPage
           && shape("values") == Shape({n.pages, n.kv, kPage, n.padded_size()})
           && shape("sequences") == tokens && shape("positions") == tokens
           && turns == ctx->has_input("sines", 0)
           && (!turns
               || (n.size % 2 == 0 && shape("cosines") == angles && shape("sines") == angles))
           && (!ctx->has_input("copies", 0)
               || (shape("copies").NumAxes() == 2 && shape("copies").At(1) == 2));
  }
  if (!fits) {
    return Error::RuntimeError()
           << "attention over pages cannot take qkv " << qkv.ToString() << ", keys "
           << keys.ToString() << ", values " << shape("values").ToString() << " and tables "
           << tables.ToString() << " with " << heads << " heads, or its other inputs do not fit";
  }
  describe_output(ctx, "context", Shape({qkv.At(0), heads * keys.At(2)}));
  return Maybe<void>::Ok();
}

Maybe<void> infer_attention_types(user_op::InferContext* ctx) {
  for (const auto& [name, index] : ctx->inputs()) {
    const bool is_page = name == "keys" || name == "values";
    const bool is_index = has_any_of(name, "tables sequences positions copies");
    const auto wanted = is_page    ? ctx->InputDType("keys", 0)
                        : is_index ? DataType::kInt32
                                   : DataType::kFloat;
    if (ctx->InputDType(name, index) != wanted) {
      return Error::RuntimeError() << "attention over pages: " << name << " has a wrong dtype";
    }
  }
  ctx->SetOutputDType("context", 0, DataType::kFloat);
  return Maybe<void>::Ok();
}

// Pages are a process's own.
Maybe<void> no_split(user_op::SbpContext*) { return Maybe<void>::Ok(); }

const NewOperator g_attention =
    new_operator("oneflow_accel_paged_attention",
                 "qkv keys values tables sequences positions copies? cosines? sines?", "context",
                 infer_attention, infer_attention_types, no_split)
        .SetInputArgModifyFn([](const user_op::GetInputArgModifier& modifier,
                                const user_op::UserOpConfWrapper&) -> Maybe<void> {
          for (const char* name : {"keys", "values"}) { modifier(name, 0)->set_is_mutable(true); }
          return Maybe<void>::Ok();
        })
        .Attr<int32_t>("heads", 1).Attr<double>("scale", 1.0).Attr<bool>("interleaved", false);

// One step's arguments.
template <typename T>
struct Step {
  Sizes n;
  const float* qkv;
  T* keys;
  T* values;
  const int32_t* tables;
  const int32_t* sequences;
  const int32_t* positions;
  const float* cosines;
  const float* sines;
  bool interleaved;
  float scale;
  float* context;
  // (tokens, heads, size), turned and scaled.
  float* queries = nullptr;

  int64_t page(int64_t token, int64_t number) const {
    const int64_t found = tables[sequences[token] * n.most_pages + number];
    if (found < 0 || found >= n.pages) {
      throw std::runtime_error("a token of a sequence has no page");
    }
    return found;
  }
};

// A head of a token with its pairs turned, times `scale`.
template <typename T>
void turn(const Step<T>& s, int64_t token, const float* x, float scale, float* y) {
  const int64_t half = s.n.size / 2;
  if (s.cosines == nullptr) {
    for (int64_t i = 0; i < s.n.size; ++i) { y[i] = x[i] * scale; }
    return;
  }
  const float* cosines = s.cosines + token * half;
  const float* sines = s.sines + token * half;
  for (int64_t i = 0; i < half; ++i) {
    const int64_t first = s.interleaved ? 2 * i : i;
    const int64_t second = s.interleaved ? 2 * i + 1 : i + half;
    y[first] = (x[first] * cosines[i] - x[second] * sines[i]) * scale;
    y[second] = (x[second] * cosines[i] + x[first] * sines[i]) * scale;
  }
}

template <typename T>
void write_token(const Step<T>& s, int64_t token) {
  const Sizes& n = s.n;
  const float* from = s.qkv + token * n.width();
  for (int64_t head = 0; head < n.heads; ++head) {
    const int64_t place = head * n.size;
    turn(s, token, from + place, s.scale, s.queries + token * n.heads * n.size + place);
  }
  const int64_t page = s.page(token, s.positions[token] / kPage);
  const int64_t column = s.positions[token] % kPage;
  auto* turned = scratch<float>(ScratchSlot::kRoundedA, n.size);
  for (int64_t head = 0; head < n.kv; ++head) {
    turn(s, token, from + (n.heads + head) * n.size, 1.0F, turned);
    const float* value = from + (n.heads + n.kv + head) * n.size;
    T* keys = s.keys + page * n.keys_of_page() + head * n.size * kPage + column;
    T* values = s.values + page * n.values_of_page() + (head * kPage + column) * n.padded_size();
    for (int64_t i = 0; i < n.size; ++i) {
      keys[i * kPage] = from_float<T>(turned[i]);
      values[i] = from_float<T>(value[i]);
    }
    std::fill(values + n.size, values + n.padded_size(), T{});
  }
}

// Numbers of a page as floats: themselves, or widened to `space`.
const float* as_floats(const float* page, int64_t, float*) { return page; }
const float* as_floats(const Bfloat16* page, int64_t count, float* space) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) { space[i] = to_float(page[i]); }
  return space;
}

// Softmax of one row over one more page, of whose scores it sees the first `seen`. `most` and
// `total` are the largest score and the sum of exponentials so far; what the sums of values are
// multiplied by is returned.
float add_page(float* scores, int64_t seen, float* most, float* total) {
  std::fill(scores + seen, scores + kPage, -INFINITY);
  float largest = *most;
#pragma omp simd reduction(max : largest)
  for (int64_t j = 0; j < kPage; ++j) { largest = std::max(largest, scores[j]); }
  float sum = 0.0F;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < kPage; ++j) {
    scores[j] = simd::exp(scores[j] - largest);
    sum += scores[j];
  }
  const float kept = simd::exp(*most - largest);
  *total = *total * kept + sum;
  *most = largest;
  return kept;
}

// `count` tokens of one sequence, from `token` on, attend with the query heads of one head of keys.
template <typename T>
void attend(const Step<T>& s, int64_t token, int64_t count, int64_t head) {
  const Sizes& n = s.n;
  const int64_t group = n.heads / n.kv;
  const int64_t rows = count * group;
  const int64_t width = n.padded_size();
  float *queries, *scores, *sums, *most, *total, *space;
  Carver::carve([&](Carver* carver) {
    queries = carver->take(rows * n.size);
    scores = carver->take(rows * kPage);
    sums = carver->take(rows * width);
    most = carver->take(rows);
    total = carver->take(rows);
    space = carver->take(kPage * width);
  });
  for (int64_t i = 0; i < count; ++i) {
    std::copy_n(s.queries + ((token + i) * n.heads + head * group) * n.size, group * n.size,
                queries + i * group * n.size);
  }
  std::fill_n(sums, rows * width, 0.0F);
  std::fill_n(most, rows, -INFINITY);
  std::fill_n(total, rows, 0.0F);
  const int64_t last = s.positions[token + count - 1];
  for (int64_t first = 0; first <= last; first += kPage) {
    const int64_t page = s.page(token, first / kPage);
    const float* keys = as_floats(s.keys + page * n.keys_of_page() + head * n.size * kPage,
                                  n.size * kPage, space);
    panel_product(rows, kPage, n.size, {queries, n.size, 1}, keys, kPage, scores, kPage, false);
    for (int64_t row = 0; row < rows; ++row) {
      // Every token sees the first page, so that there is a largest score.
      const int64_t seen = s.positions[token + row / group] - first + 1;
      const float kept = add_page(scores + row * kPage, std::clamp<int64_t>(seen, 0, kPage),
                                  most + row, total + row);
      if (kept == 1.0F) { continue; }
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) { sums[row * width + i] *= kept; }
    }
    // Values after the last token are whatever the memory has.
    const int64_t depth = std::min(kPage, last - first + 1);
    const float* values = as_floats(s.values + page * n.values_of_page() + head * kPage * width,
                                    depth * width, space);
    panel_product(rows, width, depth, {scores, kPage, 1}, values, width, sums, width, true);
  }
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t place = (token + row / group) * n.heads + head * group + row % group;
    const float inverse = 1.0F / total[row];
    for (int64_t i = 0; i < n.size; ++i) {
      s.context[place * n.size + i] = sums[row * width + i] * inverse;
    }
  }
}

template <typename T>
void attention_kernel(Context* ctx) {
  Step<T> s{sizes_of(shape_of(ctx, "qkv"), shape_of(ctx, "keys"), shape_of(ctx, "tables"),
                     ctx->Attr<int32_t>("heads")),
            input(ctx, "qkv"),
            output<T>(ctx, "keys"),
            output<T>(ctx, "values"),
            input<int32_t>(ctx, "tables"),
            input<int32_t>(ctx, "sequences"),
            input<int32_t>(ctx, "positions"),
            input_or_null(ctx, "cosines"),
            input_or_null(ctx, "sines"),
            ctx->Attr<bool>("interleaved"),
            static_cast<float>(ctx->Attr<double>("scale")),
            output(ctx, "context")};
  const Sizes& n = s.n;
  const ThreadScope threads;
  if (ctx->has_input("copies", 0)) {
    const auto* copies = input<int32_t>(ctx, "copies");
    for_each_block(shape_of(ctx, "copies").At(0), n.keys_of_page(), [&](int64_t i) {
      const auto copy = [&](T* pages, int64_t size) {
        std::copy_n(pages + copies[2 * i] * size, size, pages + copies[2 * i + 1] * size);
      };
      copy(s.keys, n.keys_of_page());
      copy(s.values, n.values_of_page());
    });
  }
  s.queries = scratch<float>(ScratchSlot::kDestination, n.tokens * n.heads * n.size);
  for_each_block(n.tokens, 4 * n.width(), [&](int64_t token) { write_token(s, token); });
  // Tokens that follow each other in a sequence go together, a few at a time.
  std::vector<std::pair<int64_t, int64_t>> blocks;
  int64_t seen = 0;
  for (int64_t first = 0, next = 0; first < n.tokens; first = next) {
    while (next < n.tokens && next - first < kTokensAtOnce
           && s.sequences[next] == s.sequences[first]) {
      seen += s.positions[next] + 1;
      ++next;
    }
    blocks.emplace_back(first, next - first);
  }
  const int64_t tasks = static_cast<int64_t>(blocks.size()) * n.kv;
  for_each_block(tasks, 2 * seen * n.heads * n.size / std::max<int64_t>(1, tasks),
                 [&](int64_t task) {
    const auto& [first, count] = blocks[task / n.kv];
    attend(s, first, count, task % n.kv);
  });
}

REGISTER_KERNELS(attention_kernel, "oneflow_accel_paged_attention", "keys");

}  // namespace

}  // namespace oneflow_accel::packed
