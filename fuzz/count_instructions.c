/* A plugin of qemu that counts the instructions an emulated program executes and prints them to standard error at its end:
 * cc -shared -fPIC. What qemu offers (its interface's version 1) is declared here, since systems seldom install its header. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

struct qemu_plugin_tb;
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id, void (*called)(uint64_t id, struct qemu_plugin_tb *block));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *block, int operation, void *counter, uint64_t amount);
void qemu_plugin_register_atexit_cb(uint64_t id, void (*called)(uint64_t id, void *data), void *data);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *block);

int qemu_plugin_version = 1;
static uint64_t executed;

static void translated(uint64_t id, struct qemu_plugin_tb *block) {
  (void)id;
  qemu_plugin_register_vcpu_tb_exec_inline(block, 0 /* add */, &executed, qemu_plugin_tb_n_insns(block));
}

static void ended(uint64_t id, void *data) {
  (void)id, (void)data;
  fprintf(stderr, "%llu\n", (unsigned long long)executed);
}

int qemu_plugin_install(uint64_t id, const void *info, int count, char **arguments) {
  (void)info, (void)count, (void)arguments;
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  qemu_plugin_register_atexit_cb(id, ended, NULL);
  return 0;
}
