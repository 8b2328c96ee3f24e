// Processes of one machine that exchange tensors through memory that they share.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace oneflow_accel {

// The members call the same functions in the same order, each on tensors of the same sizes. What is
// long goes through in chunks. A group is used by one thread at a time.
class Group {
 public:
  // The group of these ranks, in this order, this process among them; the first call asks all of
  // them and waits for their answers. Null where they are one process, are not on one machine, or
  // may not share memory (ONEFLOW_ACCEL_SHARED_MEMORY=off, no room): the same answer for all.
  static Group* of(const std::vector<int64_t>& ranks);

  // `out` gets the members' `bytes` of `in`, one after the other.
  void all_gather(const char* in, char* out, int64_t bytes);
  // `out` gets `bytes` of the member `root`'s `in`.
  void broadcast(const char* in, char* out, int64_t bytes, int root);
  // The sums over the members, added in their order: the same bits for all. `out` may be `in`.
  template <typename T>
  void all_reduce(const T* in, T* out, int64_t elements);
  // The sums of this member's part, `elements` of all members' as many parts.
  template <typename T>
  void reduce_scatter(const T* in, T* out, int64_t elements);

  // Place of this process among the members.
  int index() const { return index_; }

  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

 private:
  struct Member;
  struct Segment;

  Group(int index, int count, std::unique_ptr<Segment> segment);
  static std::unique_ptr<Group> make(const std::vector<int64_t>& ranks, int index);

  // Where a member writes this chunk.
  char* slot(int member) const;
  // A chunk: waits until this member's slot is free, calls `write` with it, tells the others, waits
  // for those that `wanted` says (-1: all), and calls `read`.
  void exchange(int wanted, const std::function<void(char*)>& write,
                const std::function<void()>& read);
  // `sum` gets the sums of what the members' slots hold from `offset` elements on, in their order.
  template <typename T>
  void add_up(int64_t offset, int64_t size, T* sum) const;
  void wait_for(int member, uint32_t chunk) const;
  void tell();

  const int index_;
  const int count_;
  const std::unique_ptr<Segment> segment_;
  // Number of the chunk; it may wrap around.
  uint32_t chunk_ = 0;
};

}  // namespace oneflow_accel
