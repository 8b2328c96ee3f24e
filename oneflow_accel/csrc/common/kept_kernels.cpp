// Keeps the kernels that OneFlow has chosen usable while the plug-in registers its own.
//
// An operator that has run keeps pointers to its kernel's entry in the registry's vector
// (StatefulOpKernel::ChooseOpKernel in oneflow 0.9.0). One more kernel for that operator can move
// the vector's entries, and the operator's next run would read freed memory. So, before the first
// kernel of the plug-in is registered, the vectors get new storage, and the old one stays for ever.
#include <utility>
#include <vector>

#include "common/all_kernels.h"

// In plugin.cpp.
extern "C" int oneflow_accel_streams();

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

using Entries = Kernels::mapped_type;

// The registry shows its kernels one at a time only. An explicit instantiation may name what is
// private.
template <Kernels user_op::UserOpRegistryMgr::*member>
struct PrivateMember {
  friend Kernels& kernels_of(user_op::UserOpRegistryMgr& manager) { return manager.*member; }
};
Kernels& kernels_of(user_op::UserOpRegistryMgr& manager);
template struct PrivateMember<&user_op::UserOpRegistryMgr::op_kernel_reg_result_>;

// 101: before the registrations, which have no priority.
__attribute__((constructor(101))) void keep_entries_where_they_are() {
  if (oneflow_accel_streams() == 0) { return; }
  auto& kept = *new std::vector<Entries>;
  for (auto& [name, entries] : all_kernels()) {
    Entries copy = entries;
    entries.swap(copy);
    kept.push_back(std::move(copy));
  }
}

}  // namespace

Kernels& all_kernels() { return kernels_of(user_op::UserOpRegistryMgr::Get()); }

}  // namespace oneflow_accel
