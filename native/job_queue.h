// A thread that begins jobs in the order they were given, for a caller who wants each result soon.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace netweight {

// Work on which several threads can be at once: the queue's thread, and whoever waits for it to be done. Each returns from `work` when
// nothing is left to begin; when the last has returned, the job is done.
class Job {
 public:
  explicit Job(std::function<void()> work) : work_(std::move(work)) {}

  // Joins in the work; does nothing after wait() or close().
  void join_in();
  // Joins in and returns when the job is done.
  void wait();
  // Returns when nobody is at work; from then on nobody will be.
  void close();

 private:
  void wait_until_left();

  std::function<void()> work_;
  std::atomic<int> inside_{0};
  bool closed_ = false;
  std::mutex guard_;
  std::condition_variable left_;
};

class JobQueue {
 public:
  JobQueue();
  ~JobQueue();  // ends the thread after the job under way; those behind are left to those who wait for them
  JobQueue(const JobQueue&) = delete;
  JobQueue& operator=(const JobQueue&) = delete;

  void add(std::shared_ptr<Job> job);

 private:
  void loop();

  std::mutex guard_;
  std::condition_variable added_;
  std::deque<std::shared_ptr<Job>> jobs_;
  std::atomic<size_t> count_{0};  // of jobs in the queue, to be read without the lock
  std::atomic<bool> ending_{false};
  bool asleep_ = false;
  std::thread thread_;
};

}  // namespace netweight
