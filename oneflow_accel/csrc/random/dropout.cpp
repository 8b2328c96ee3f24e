// dropout and dropout_grad (float32, bfloat16), and random_mask_like, the mask of OneFlow's fused
// dropout operators, which depends on the shape of its input only.
#include "common/oneflow.h"
#include "common/threads.h"
#include "oneflow/core/framework/random_generator.h"
#include "random/keep.h"
#include "random/mersenne.h"

// What OneFlow's functional API hands to kernels that draw random numbers. The wheel does not ship
// the headers of these two classes: they are declared here as they are in oneflow 0.9.0, under the
// same names, so that dynamic_cast knows the objects that OneFlow makes.
namespace oneflow {

struct FusedDropoutKernelState : user_op::OpKernelState {
  explicit FusedDropoutKernelState(std::shared_ptr<one::Generator> own)
      : generator(std::move(own)) {}
  std::shared_ptr<one::Generator> generator;
};

struct RandomMaskLikeKernelState : user_op::OpKernelState {
  explicit RandomMaskLikeKernelState(std::shared_ptr<one::Generator> own)
      : generator(std::move(own)) {}
  std::shared_ptr<one::Generator> generator;
};

}  // namespace oneflow

namespace oneflow_accel::random {

namespace {

// A word of the engine keeps its element if it is at least `least`; none does where `any` is 0.
struct Threshold {
  uint32_t least;
  uint8_t any;
};

// std::uniform_real_distribution<float>(0, 1) of libstdc++ for one word.
float uniform(uint32_t word) {
  constexpr float kLargestBelowOne = 0x1.fffffep-1F;
  return std::min(static_cast<float>(word) * 0x1p-32F, kLargestBelowOne);
}

// The first word for which keeps(uniform(word)) holds: it holds for all larger ones too.
template <typename Keeps>
Threshold first_word(const Keeps& keeps) {
  uint64_t low = 0;
  uint64_t high = uint64_t{1} << 32;
  while (low < high) {
    const uint64_t middle = (low + high) / 2;
    if (keeps(uniform(static_cast<uint32_t>(middle)))) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const bool any = low >> 32 == 0;
  return {any ? static_cast<uint32_t>(low) : 0, static_cast<uint8_t>(any)};
}

// Sets the mask, 1 where an element is kept, else 0, and calls then(begin, count) on ranges of it
// that are still in the nearest cache, in parallel. `State` is the class of the kernel's state.
template <typename State, typename Then>
void draw_mask(user_op::OpKernelState* state, Threshold threshold, user_op::Tensor* mask,
               const Then& then) {
  const auto& generator = CHECK_NOTNULL(dynamic_cast<State*>(state))->generator;
  auto* bytes = reinterpret_cast<uint8_t*>(mask->mut_dptr<bool>());
  draw(CHECK_JUST(generator->template Get<::oneflow::one::CPUGeneratorImpl>())->engine(),
       mask->shape_view().elem_cnt(), [&](const uint32_t* words, int64_t begin, int64_t count) {
         // Of its own, as bytes may be anything's to the compiler.
         const Threshold own = threshold;
         uint8_t* to = bytes + begin;
#pragma omp simd
         for (int64_t i = 0; i < count; ++i) {
           to[i] = (temper(words[i]) >= own.least ? 1 : 0) & own.any;
         }
         then(begin, count);
       });
}

// Of an nn.Graph. In eager mode OneFlow hands over the generator that the call names.
std::shared_ptr<::oneflow::one::Generator> new_generator() {
  return CHECK_JUST(::oneflow::one::MakeGenerator(::oneflow::DeviceType::kCPU));
}

template <typename T>
class DropoutKernel final : public Kernel {
  using State = ::oneflow::FusedDropoutKernelState;

 public:
  std::shared_ptr<user_op::OpKernelState> CreateOpKernelState(
      user_op::KernelInitContext*) const override {
    return std::make_shared<State>(new_generator());
  }

 private:
  void Compute(Context* ctx, user_op::OpKernelState* state, const KernelCache*) const override {
    const T* x = input<T>(ctx, "in");
    const T* addend = input_or_null<T>(ctx, "_add_to_output");
    const uint8_t* mask = mask_bytes(ctx, "mask");
    T* y = output<T>(ctx, "out");
    const float rate = ctx->Attr<float>("rate");
    const float scale = rate < 1.0F ? 1.0F / (1.0F - rate) : 0.0F;
    draw_mask<State>(state, first_word([=](float number) { return number >= rate; }),
                     argument(ctx, "mask"), [&](int64_t i, int64_t count) {
                       keep_and_scale(x + i, mask + i, scale,
                                      addend == nullptr ? nullptr : addend + i, y + i, count);
                     });
  }
};

template <typename T>
void dropout_grad_kernel(Context* ctx) {
  const T* dy = input<T>(ctx, "dy");
  const uint8_t* mask = mask_bytes(ctx, "mask");
  const float scale = ctx->Attr<float>("scale");
  T* dx = output<T>(ctx, "dx");
  const int64_t n = shape_of(ctx, "dy").elem_cnt();
  parallel_for(n, kGrainSize, [=](int64_t begin, int64_t end) {
    keep_and_scale<T, T>(dy + begin, mask + begin, scale, nullptr, dx + begin, end - begin);
  });
}

class RandomMaskLikeKernel final : public Kernel {
  using State = ::oneflow::RandomMaskLikeKernelState;

 public:
  std::shared_ptr<user_op::OpKernelState> CreateOpKernelState(
      user_op::KernelInitContext* ctx) const override {
    const auto generator = new_generator();
    generator->set_current_seed(ctx->Attr<int64_t>("seed"));
    return std::make_shared<State>(generator);
  }

 private:
  void Compute(Context* ctx, user_op::OpKernelState* state, const KernelCache*) const override {
    const float rate = ctx->Attr<float>("rate");
    draw_mask<State>(state, first_word([=](float number) { return number > rate; }),
                     argument(ctx, "out"), [](int64_t, int64_t) {});
  }
};

const auto kInPlace = in_place("out", "in");
REGISTER_KERNEL("dropout", make<DropoutKernel<float>>, is_float32_on_cpu("out"), kInPlace);
REGISTER_KERNEL("dropout", make<DropoutKernel<Bfloat16>>, is_bfloat16_on_cpu("out"), kInPlace);
REGISTER_KERNELS(dropout_grad_kernel, "dropout_grad", "dx", in_place("dx", "dy"));
REGISTER_KERNEL("random_mask_like", make<RandomMaskLikeKernel>,
                is_on_cpu("out", DataType::kBool));

}  // namespace

}  // namespace oneflow_accel::random
