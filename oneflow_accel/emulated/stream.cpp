// Streams: each has a queue and a thread of its own, so that work is done some time after it has been
// given, in its order. A program that does not wait for it reads what was there before.
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "common/waiting.h"
#include "emulated/emulated.h"

namespace oneflow_accel::emulated {

namespace {

void sleep(double seconds) {
  if (seconds > 0) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }
}

class Queue {
 public:
  using Work = std::function<void()>;

  void give(Work work) {
    std::unique_lock<std::mutex> lock(mutex_);
    works_.push_back(std::move(work));
    given_.fetch_add(1, std::memory_order_relaxed);
    const bool sleeps = sleeps_;
    lock.unlock();
    if (sleeps) { changed_.notify_all(); }
  }
  int64_t given() const { return given_.load(std::memory_order_relaxed); }
  bool is_done(int64_t number) const { return done_.load(std::memory_order_acquire) >= number; }
  void wait_for(int64_t number) {
    if (comes_true_soon([&] { return is_done(number); })) { return; }
    std::unique_lock<std::mutex> lock(mutex_);
    ++waiting_;
    changed_.wait(lock, [&] { return is_done(number); });
    --waiting_;
  }
  // Those of the thread, until there is nothing left and no more will come.
  void work_off() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      sleeps_ = true;
      changed_.wait(lock, [&] { return !works_.empty() || ends_; });
      sleeps_ = false;
      if (works_.empty()) { return; }
      {
        const Work work = std::move(works_.front());
        works_.pop_front();
        lock.unlock();
        sleep(options().delay);
        work();
        // What it holds goes before anybody hears that it is done.
      }
      lock.lock();
      done_.fetch_add(1, std::memory_order_release);
      if (waiting_ > 0) { changed_.notify_all(); }
    }
  }
  void end() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ends_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> works_;
  std::atomic<int64_t> given_{0}, done_{0};
  int64_t waiting_ = 0;
  bool sleeps_ = false;
  bool ends_ = false;
};

// All that have not been destroyed. Never destroyed itself: OneFlow's threads may outlive it.
struct Queues {
  std::mutex mutex;
  std::set<std::shared_ptr<Queue>> all;
};
Queues& queues() {
  static auto* const queues = new Queues;
  return *queues;
}

class Event final : public ep::Event {
 public:
  Maybe<bool> QueryDone() override { return !queue_ || queue_->is_done(number_); }
  Maybe<void> Sync() override {
    if (queue_) { queue_->wait_for(number_); }
    return Maybe<void>::Ok();
  }
  void record(const std::shared_ptr<Queue>& queue) {
    queue_ = queue;
    number_ = queue ? queue->given() : 0;
  }

 private:
  std::shared_ptr<Queue> queue_;
  int64_t number_ = 0;
};

class Stream final : public ep::Stream {
 public:
  Stream(ep::Device* device, ep::Device* cpu)
      : device_(device), cpu_(cpu), inner_(cpu->CreateStream()) {
    if (options().is_asynchronous == 0) { return; }
    queue_ = std::make_shared<Queue>();
    thread_ = std::thread([queue = queue_] {
      pthread_setname_np(pthread_self(), "emulated stream");
      queue->work_off();
    });
    const std::lock_guard<std::mutex> lock(queues().mutex);
    queues().all.insert(queue_);
  }
  ~Stream() override {
    if (queue_) {
      queue_->end();
      thread_.join();
      const std::lock_guard<std::mutex> lock(queues().mutex);
      queues().all.erase(queue_);
    }
    cpu_->DestroyStream(inner_);
  }

  DeviceType device_type() const override { return kDevice; }
  ep::Device* device() const override { return device_; }
  Maybe<void> Sync() override {
    if (queue_) { queue_->wait_for(queue_->given()); }
    return Maybe<void>::Ok();
  }
  void RecordEvent(ep::Event* event) override { static_cast<Event*>(event)->record(queue_); }

  void run(Queue::Work work) {
    if (queue_) { return queue_->give(std::move(work)); }
    sleep(options().delay);
    work();
  }
  ep::Stream* inner() { return inner_; }

 private:
  ep::Device* const device_;
  ep::Device* const cpu_;
  ep::Stream* const inner_;
  std::shared_ptr<Queue> queue_;
  std::thread thread_;
};

Stream* ours(ep::Stream* stream) {
  CHECK_EQ(stream->device_type(), kDevice);
  return static_cast<Stream*>(stream);
}

// Whether the device is lost, which each operation that finds it so tells Python.
bool is_lost(ep::Stream* stream) {
  static std::atomic<int64_t> operations{0};
  const int64_t lost_at = options().lost_at;
  if (lost_at == 0 || ++operations < lost_at) { return false; }
  const std::string name = "emulated:" + std::to_string(stream->device()->device_index());
  host().fail((name + " is lost: nothing runs on it any more").c_str());
  return true;
}

}  // namespace

ep::Stream* make_stream(ep::Device* device, ep::Device* cpu) { return new Stream(device, cpu); }
ep::Event* make_event() { return new Event; }

ep::Stream* cpu_stream(ep::Stream* stream) { return ours(stream)->inner(); }

void run(ep::Stream* stream, std::function<void()> work) {
  if (options().lost_at == 0) { return ours(stream)->run(std::move(work)); }
  ours(stream)->run([stream, work = std::move(work)] {
    if (!is_lost(stream)) { work(); }
  });
}

void run_in_call(ep::Stream* stream, const std::function<void()>& work) {
  CHECK_JUST(stream->Sync());
  if (!is_lost(stream)) { work(); }
}

void drain_all() {
  std::set<std::shared_ptr<Queue>> all;
  {
    const std::lock_guard<std::mutex> lock(queues().mutex);
    all = queues().all;
  }
  for (const auto& queue : all) { queue->wait_for(queue->given()); }
}

bool fails(const std::string& op) {
  static std::atomic<int64_t> launches{0};
  if (options().fails_at == 0 || op != options().failing) { return false; }
  if (++launches != options().fails_at) { return false; }
  host().fail((op + " failed at its launch " + std::to_string(launches)).c_str());
  return true;
}

void pass_link(std::size_t bytes) {
  const double rate = options().bytes_per_second;
  sleep(options().latency + (rate > 0 ? static_cast<double>(bytes) / rate : 0));
}

}  // namespace oneflow_accel::emulated
