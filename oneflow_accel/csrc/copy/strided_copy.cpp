#include "copy/strided_copy.h"

#include <algorithm>
#include <cstring>

#include "common/threads.h"
#include "copy/transpose_tile.h"

namespace oneflow_accel {

namespace {

// Below this many bytes per thread, waking another thread costs more than it saves.
constexpr int64_t kGrainBytes = 64 * 1024;

// Counts through dimensions in row-major order and keeps the offsets in elements up to date.
class Cursor {
 public:
  Cursor(const std::vector<CopyDim>& dims, int64_t index) : dims_(dims), position_(dims.size()) {
    for (std::size_t k = dims.size(); k-- > 0;) {
      position_[k] = index % dims[k].size;
      index /= dims[k].size;
      advance(dims[k], position_[k]);
    }
  }

  void next() {
    for (std::size_t k = dims_.size(); k-- > 0;) {
      advance(dims_[k], 1);
      if (++position_[k] < dims_[k].size) { return; }
      advance(dims_[k], -dims_[k].size);
      position_[k] = 0;
    }
  }

  int64_t source() const { return source_; }
  int64_t destination() const { return destination_; }

 private:
  void advance(const CopyDim& dim, int64_t steps) {
    source_ += steps * dim.source_stride;
    destination_ += steps * dim.destination_stride;
  }

  const std::vector<CopyDim>& dims_;
  std::vector<int64_t> position_;
  int64_t source_ = 0;
  int64_t destination_ = 0;
};

// The same copy with as few dimensions as possible, in the destination's order.
std::vector<CopyDim> merged(std::vector<CopyDim> dims) {
  dims.erase(std::remove_if(dims.begin(), dims.end(), [](const CopyDim& d) { return d.size == 1; }),
             dims.end());
  std::stable_sort(dims.begin(), dims.end(), [](const CopyDim& a, const CopyDim& b) {
    return a.destination_stride > b.destination_stride;
  });
  std::vector<CopyDim> result;
  for (const CopyDim& inner : dims) {
    if (!result.empty() && result.back().source_stride == inner.source_stride * inner.size
        && result.back().destination_stride == inner.destination_stride * inner.size) {
      result.back() = {result.back().size * inner.size, inner.source_stride,
                       inner.destination_stride};
    } else {
      result.push_back(inner);
    }
  }
  if (result.empty()) { result.push_back({1, 1, 1}); }
  return result;
}

int64_t count(const std::vector<CopyDim>& dims) {
  int64_t n = 1;
  for (const CopyDim& dim : dims) { n *= dim.size; }
  return n;
}

// Calls fn(source offset, destination offset, n) for n neighbors in the dimension `last` inside
// `outer`, in parallel. Threads share out what is in it, so that few long ones keep all of them
// busy as well.
template <typename Fn>
void for_each_part(const std::vector<CopyDim>& outer, const CopyDim& last, int64_t grain,
                   const Fn& fn) {
  parallel_for(count(outer) * last.size, grain, [&](int64_t begin, int64_t end) {
    Cursor cursor(outer, begin / last.size);
    for (int64_t skip = begin % last.size; begin < end; skip = 0, cursor.next()) {
      const int64_t n = std::min(last.size - skip, end - begin);
      fn(cursor.source() + skip * last.source_stride,
         cursor.destination() + skip * last.destination_stride, n);
      begin += n;
    }
  });
}

template <typename T>
void copy_run(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t n) {
  if (to_stride == 1 && from_stride == 1) {
    std::memcpy(to, from, n * sizeof(T));
  } else if (to_stride == 1 && from_stride == 0) {
    std::fill_n(to, n, *from);
  } else {
    for (int64_t i = 0; i < n; ++i) { to[i * to_stride] = from[i * from_stride]; }
  }
}

template <typename T>
void copy_runs(std::vector<CopyDim> dims, const T* source, T* destination) {
  const CopyDim run = dims.back();
  dims.pop_back();
  for_each_part(dims, run, kGrainBytes / sizeof(T), [&](int64_t from, int64_t to, int64_t n) {
    copy_run(source + from, run.source_stride, destination + to, run.destination_stride, n);
  });
}

// Runs up to this long, such as the heads of attention, cost less copied here than by a call each.
constexpr int64_t kShortRunBytes = 1024;
constexpr int64_t kPieceBytes = 64;

// `rows` runs of `bytes` >= kPieceBytes bytes; strides count bytes. The last piece of a run may
// overlap the one before.
void copy_pieces(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t rows,
                 int64_t bytes) {
  const int64_t last = bytes - kPieceBytes;
  for (int64_t r = 0; r < rows; ++r, from += from_stride, to += to_stride) {
    for (int64_t i = 0; i < last; i += kPieceBytes) { std::memcpy(to + i, from + i, kPieceBytes); }
    std::memcpy(to + last, from + last, kPieceBytes);
  }
}

// Copies short runs that are contiguous on both sides: (outer, rows, run).
template <typename T>
void copy_short_runs(std::vector<CopyDim> dims, const T* source, T* destination) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(T));
  const int64_t run_bytes = dims.back().size * kBytes;
  dims.pop_back();
  const CopyDim rows = dims.back();
  dims.pop_back();
  for_each_part(dims, rows, kGrainBytes / run_bytes, [&](int64_t from, int64_t to, int64_t n) {
    copy_pieces(reinterpret_cast<const char*>(source + from), rows.source_stride * kBytes,
                reinterpret_cast<char*>(destination + to), rows.destination_stride * kBytes, n,
                run_bytes);
  });
}

// Copies tiles over the dimension that is contiguous in the source, `columns`, and the one that is
// contiguous in the destination, `rows`.
template <typename T>
void copy_tiles(std::vector<CopyDim> outer, const CopyDim& rows, const CopyDim& columns,
                const T* source, T* destination) {
  const int64_t row_tiles = ceil_div(rows.size, kTransposeTile);
  const int64_t column_tiles = ceil_div(columns.size, kTransposeTile);
  // Strides of whole tiles; the last one of each may be smaller.
  outer.push_back({column_tiles, kTransposeTile, kTransposeTile * columns.destination_stride});
  outer.push_back({row_tiles, kTransposeTile * rows.source_stride, kTransposeTile});
  const int64_t tile_bytes = static_cast<int64_t>(sizeof(T))
                             * std::min(rows.size, kTransposeTile)
                             * std::min(columns.size, kTransposeTile);
  const int64_t grain = std::max<int64_t>(kGrainBytes / tile_bytes, 1);
  parallel_for(count(outer), grain, [&](int64_t begin, int64_t end) {
    Cursor cursor(outer, begin);
    for (int64_t i = begin; i < end; ++i, cursor.next()) {
      const int64_t row = i % row_tiles * kTransposeTile;
      const int64_t column = i / row_tiles % column_tiles * kTransposeTile;
      transpose_tile(source + cursor.source(), rows.source_stride,
                     destination + cursor.destination(), columns.destination_stride,
                     std::min(rows.size - row, kTransposeTile),
                     std::min(columns.size - column, kTransposeTile));
    }
  });
}

// `dims` are merged.
template <typename T>
void copy_as(std::vector<CopyDim> dims, const void* source, void* destination) {
  const auto* from = static_cast<const T*>(source);
  auto* to = static_cast<T*>(destination);
  const CopyDim last = dims.back();
  if (last.destination_stride == 1 && last.source_stride != 1) {
    const auto columns = std::find_if(dims.begin(), dims.end(), [](const CopyDim& dim) {
      return dim.source_stride == 1;
    });
    if (columns != dims.end()) {
      const CopyDim column = *columns;
      dims.erase(columns);
      dims.pop_back();
      return copy_tiles(std::move(dims), last, column, from, to);
    }
  }
  const int64_t run_bytes = last.size * static_cast<int64_t>(sizeof(T));
  if (dims.size() > 1 && last.destination_stride == 1 && last.source_stride == 1
      && run_bytes >= kPieceBytes && run_bytes <= kShortRunBytes) {
    return copy_short_runs(std::move(dims), from, to);
  }
  copy_runs(std::move(dims), from, to);
}

}  // namespace

void strided_copy(std::vector<CopyDim> dims, std::size_t element_bytes, const void* source,
                  void* destination) {
  if (count(dims) == 0) { return; }
  dims = merged(std::move(dims));
  switch (element_bytes) {
    case 8: return copy_as<uint64_t>(std::move(dims), source, destination);
    case 4: return copy_as<float>(std::move(dims), source, destination);
    case 2: return copy_as<uint16_t>(std::move(dims), source, destination);
    default: return copy_as<uint8_t>(std::move(dims), source, destination);
  }
}

void zero_fill(void* destination, int64_t bytes) {
  auto* to = static_cast<char*>(destination);
  parallel_for(bytes, kGrainBytes,
               [=](int64_t begin, int64_t end) { std::memset(to + begin, 0, end - begin); });
}

}  // namespace oneflow_accel
