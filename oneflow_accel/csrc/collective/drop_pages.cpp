// oneflow_accel_drop_pages: takes parts of memory that is shared with other processes out of this
// process, once all that was asked of the device before has run. What is in them stays, and comes
// back where they are read again.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <vector>

#include "common/infer.h"
#include "common/oneflow.h"

namespace oneflow_accel {

namespace {

Maybe<void> infer(user_op::InferContext* ctx) {
  describe_output(ctx, "done", ::oneflow::Shape({1}));
  return Maybe<void>::Ok();
}

Maybe<void> no_splits(user_op::SbpContext* ctx) {
  ctx->NewBuilder().Broadcast(ctx->inputs()).Broadcast(ctx->outputs()).Build();
  return Maybe<void>::Ok();
}

// `x` must be all of a file's memory, MAP_SHARED: other memory would be lost. `bytes` has where
// each part begins and ends.
const NewOperator g_operator = new_operator("oneflow_accel_drop_pages", "x", "done", infer,
                                            one_dtype("oneflow_accel_drop_pages"), no_splits)
                                   .Attr<std::vector<int64_t>>("bytes", std::vector<int64_t>());

void drop_pages_kernel(Context* ctx) {
  const auto& bytes = ctx->Attr<std::vector<int64_t>>("bytes");
  char* memory = const_cast<char*>(input<char>(ctx, "x"));
  const int64_t page = sysconf(_SC_PAGESIZE);
  for (std::size_t i = 0; i + 1 < bytes.size(); i += 2) {
    // Whole pages only.
    const int64_t begin = (bytes[i] + page - 1) / page * page;
    const int64_t end = bytes[i + 1] / page * page;
    if (begin < end) { madvise(memory + begin, end - begin, MADV_DONTNEED); }
  }
  output(ctx, "done")[0] = 0;
}

REGISTER_FLOAT_KERNEL(drop_pages_kernel, "oneflow_accel_drop_pages", "done");

}  // namespace

}  // namespace oneflow_accel
