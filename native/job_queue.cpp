// Jobs of some hundred microseconds: waking a sleeping thread costs as much as a job, so both sides look again for a while first,
// longer than a layer of a language model takes between two of its products.
#include "job_queue.h"

#include <chrono>

namespace netweight {
namespace {

constexpr std::chrono::microseconds kPatience{3000};

// Looks again until `ready` or patience ends; returns whether it is ready.
template <typename Ready>
bool look_again(Ready ready) {
  static const bool alone = std::thread::hardware_concurrency() < 2;  // on one processor the other side must run for it
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!ready()) {
    if (alone || std::chrono::steady_clock::now() > end) return ready();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  return true;
}

}  // namespace

void Job::join_in() {
  {
    std::lock_guard<std::mutex> lock(guard_);
    if (closed_) return;
    inside_++;
  }
  work_();
  std::lock_guard<std::mutex> lock(guard_);
  if (--inside_ == 0) left_.notify_all();
}

void Job::wait() {
  join_in();
  close();
}

void Job::close() {
  {
    std::lock_guard<std::mutex> lock(guard_);
    closed_ = true;
  }
  wait_until_left();
}

void Job::wait_until_left() {
  look_again([&] { return inside_ == 0; });
  std::unique_lock<std::mutex> lock(guard_);  // also lets the last one out of its own lock
  left_.wait(lock, [&] { return inside_ == 0; });
}

JobQueue::JobQueue() : thread_([this] { loop(); }) {}

JobQueue::~JobQueue() {
  {
    std::lock_guard<std::mutex> lock(guard_);
    ending_ = true;
  }
  added_.notify_one();
  thread_.join();
}

void JobQueue::add(std::shared_ptr<Job> job) {
  bool wake;
  {
    std::lock_guard<std::mutex> lock(guard_);
    jobs_.push_back(std::move(job));
    count_++;
    wake = asleep_;
  }
  if (wake) added_.notify_one();
}

void JobQueue::loop() {
  for (;;) {
    look_again([&] { return count_ > 0 || ending_; });
    std::shared_ptr<Job> job;
    {
      std::unique_lock<std::mutex> lock(guard_);
      asleep_ = true;
      added_.wait(lock, [&] { return !jobs_.empty() || ending_; });
      asleep_ = false;
      if (ending_) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
      count_--;
    }
    job->join_in();
  }
}

}  // namespace netweight
