// Keeps OneFlow's scheduler thread off the cores that kernels need.
//
// While an nn.Graph runs, the scheduler thread polls for its end and calls sched_yield() between
// two looks, for as long as the step takes: the system gives it up to half of a core that belongs
// to a kernel's team, and the whole team waits. So the entry for sched_yield in liboneflow's
// procedure linkage table leads to the function below, which sleeps where a thread does nothing
// but yield.
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

namespace oneflow_accel {

namespace {

using Clock = std::chrono::steady_clock;

// Between eager operations the scheduler is polled for less than this: they start as fast as
// before.
constexpr auto kPollingTime = std::chrono::microseconds(100);
// A nap is this part of the time already waited, so that the end of a graph is noticed little later
// than it comes, and at most kLongestNap.
constexpr int kNapDivisor = 16;
constexpr Clock::duration kLongestNap = std::chrono::microseconds(500);
// Work between two yields that ends a run of them.
constexpr auto kWork = std::chrono::microseconds(20);

std::atomic<int64_t> g_naps{0};

int yield_or_nap() {
  thread_local Clock::time_point first{};
  thread_local Clock::time_point last{};
  const Clock::time_point now = Clock::now();
  if (now - last > kWork) { first = now; }
  const Clock::duration waited = now - first;
  if (waited > kPollingTime) {
    g_naps.fetch_add(1, std::memory_order_relaxed);
    std::this_thread::sleep_for(std::min(waited / kNapDivisor, kLongestNap));
  } else {
    ::sched_yield();
  }
  last = Clock::now();
  return 0;
}

template <typename T>
const T* table(const dl_phdr_info& library, ElfW(Addr) address) {
  // glibc has added the load address already, other loaders have not.
  return reinterpret_cast<const T*>(address < library.dlpi_addr ? library.dlpi_addr + address
                                                                : address);
}

// Leads calls of `function` from `library` to `replacement`; false where it makes none. The slot
// is writable, as the loader fills it at the first call.
bool redirect(const dl_phdr_info& library, const char* function, int (*replacement)()) {
  const ElfW(Dyn)* dynamic = nullptr;
  for (int i = 0; i < library.dlpi_phnum; ++i) {
    const auto& header = library.dlpi_phdr[i];
    if (header.p_type == PT_DYNAMIC) {
      dynamic = reinterpret_cast<const ElfW(Dyn)*>(library.dlpi_addr + header.p_vaddr);
    }
  }
  const ElfW(Rela)* slots = nullptr;
  const ElfW(Sym)* symbols = nullptr;
  const char* names = nullptr;
  std::size_t bytes = 0;
  for (; dynamic != nullptr && dynamic->d_tag != DT_NULL; ++dynamic) {
    const auto& value = dynamic->d_un;
    // A library linked with -z now has read-only slots.
    if (dynamic->d_tag == DT_FLAGS && (value.d_val & DF_BIND_NOW) != 0) { return false; }
    if (dynamic->d_tag == DT_JMPREL) { slots = table<ElfW(Rela)>(library, value.d_ptr); }
    if (dynamic->d_tag == DT_SYMTAB) { symbols = table<ElfW(Sym)>(library, value.d_ptr); }
    if (dynamic->d_tag == DT_STRTAB) { names = table<char>(library, value.d_ptr); }
    if (dynamic->d_tag == DT_PLTRELSZ) { bytes = value.d_val; }
  }
  if (slots == nullptr || symbols == nullptr || names == nullptr) { return false; }
  for (std::size_t i = 0; i < bytes / sizeof(ElfW(Rela)); ++i) {
    const auto& symbol = symbols[ELF64_R_SYM(slots[i].r_info)];
    if (std::strcmp(names + symbol.st_name, function) != 0) { continue; }
    auto* slot = reinterpret_cast<void**>(library.dlpi_addr + slots[i].r_offset);
    __atomic_store_n(slot, reinterpret_cast<void*>(replacement), __ATOMIC_RELEASE);
    return true;
  }
  return false;
}

int redirect_in_oneflow(dl_phdr_info* library, std::size_t, void*) {
  if (std::strstr(library->dlpi_name, "/liboneflow-") == nullptr) { return 0; }
  redirect(*library, "sched_yield", yield_or_nap);
  return 1;
}

// When the library is loaded.
const int g_redirected = dl_iterate_phdr(redirect_in_oneflow, nullptr);

}  // namespace

}  // namespace oneflow_accel

// How often a thread has slept instead of yielding: for tests.
extern "C" int64_t oneflow_accel_naps() { return oneflow_accel::g_naps.load(); }
