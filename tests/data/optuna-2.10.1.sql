BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('v2.6.0.a');
CREATE TABLE studies (
	study_id INTEGER NOT NULL, 
	study_name VARCHAR(512) NOT NULL, 
	PRIMARY KEY (study_id)
);
INSERT INTO "studies" VALUES(1,'old');
CREATE TABLE study_directions (
	study_direction_id INTEGER NOT NULL, 
	direction VARCHAR(8) NOT NULL, 
	study_id INTEGER NOT NULL, 
	objective INTEGER NOT NULL, 
	PRIMARY KEY (study_direction_id), 
	UNIQUE (study_id, objective), 
	FOREIGN KEY(study_id) REFERENCES studies (study_id)
);
INSERT INTO "study_directions" VALUES(1,'MAXIMIZE',1,0);
CREATE TABLE study_system_attributes (
	study_system_attribute_id INTEGER NOT NULL, 
	study_id INTEGER, 
	"key" VARCHAR(512), 
	value_json TEXT, 
	PRIMARY KEY (study_system_attribute_id), 
	UNIQUE (study_id, "key"), 
	FOREIGN KEY(study_id) REFERENCES studies (study_id)
);
CREATE TABLE study_user_attributes (
	study_user_attribute_id INTEGER NOT NULL, 
	study_id INTEGER, 
	"key" VARCHAR(512), 
	value_json TEXT, 
	PRIMARY KEY (study_user_attribute_id), 
	UNIQUE (study_id, "key"), 
	FOREIGN KEY(study_id) REFERENCES studies (study_id)
);
CREATE TABLE trial_heartbeats (
	trial_heartbeat_id INTEGER NOT NULL, 
	trial_id INTEGER NOT NULL, 
	heartbeat DATETIME NOT NULL, 
	PRIMARY KEY (trial_heartbeat_id), 
	UNIQUE (trial_id), 
	FOREIGN KEY(trial_id) REFERENCES trials (trial_id)
);
CREATE TABLE trial_intermediate_values (
	trial_intermediate_value_id INTEGER NOT NULL, 
	trial_id INTEGER NOT NULL, 
	step INTEGER NOT NULL, 
	intermediate_value FLOAT NOT NULL, 
	PRIMARY KEY (trial_intermediate_value_id), 
	UNIQUE (trial_id, step), 
	FOREIGN KEY(trial_id) REFERENCES trials (trial_id)
);
INSERT INTO "trial_intermediate_values" VALUES(1,1,10,1.66666666666666664353e-02);
INSERT INTO "trial_intermediate_values" VALUES(2,1,20,3.33333333333333328707e-02);
INSERT INTO "trial_intermediate_values" VALUES(3,1,30,0.05);
INSERT INTO "trial_intermediate_values" VALUES(4,1,40,6.66666666666666657414e-02);
INSERT INTO "trial_intermediate_values" VALUES(5,1,50,8.33333333333333287074e-02);
INSERT INTO "trial_intermediate_values" VALUES(6,1,60,0.1);
INSERT INTO "trial_intermediate_values" VALUES(7,1,70,1.16666666666666668517e-01);
INSERT INTO "trial_intermediate_values" VALUES(8,1,80,1.33333333333333331482e-01);
INSERT INTO "trial_intermediate_values" VALUES(9,1,90,0.15);
INSERT INTO "trial_intermediate_values" VALUES(10,1,100,1.66666666666666657414e-01);
INSERT INTO "trial_intermediate_values" VALUES(11,2,10,3.33333333333333328707e-02);
INSERT INTO "trial_intermediate_values" VALUES(12,2,20,6.66666666666666657414e-02);
INSERT INTO "trial_intermediate_values" VALUES(13,2,30,0.1);
INSERT INTO "trial_intermediate_values" VALUES(14,2,40,1.33333333333333331482e-01);
INSERT INTO "trial_intermediate_values" VALUES(15,2,50,1.66666666666666657414e-01);
INSERT INTO "trial_intermediate_values" VALUES(16,2,60,0.2);
INSERT INTO "trial_intermediate_values" VALUES(17,2,70,2.33333333333333337034e-01);
INSERT INTO "trial_intermediate_values" VALUES(18,2,80,2.66666666666666662965e-01);
INSERT INTO "trial_intermediate_values" VALUES(19,2,90,0.3);
INSERT INTO "trial_intermediate_values" VALUES(20,2,100,3.33333333333333314829e-01);
INSERT INTO "trial_intermediate_values" VALUES(21,3,10,6.66666666666666657414e-02);
INSERT INTO "trial_intermediate_values" VALUES(22,3,20,1.33333333333333331482e-01);
INSERT INTO "trial_intermediate_values" VALUES(23,3,30,0.2);
INSERT INTO "trial_intermediate_values" VALUES(24,3,40,2.66666666666666662965e-01);
INSERT INTO "trial_intermediate_values" VALUES(25,3,50,3.33333333333333314829e-01);
INSERT INTO "trial_intermediate_values" VALUES(26,3,60,0.4);
INSERT INTO "trial_intermediate_values" VALUES(27,3,70,4.66666666666666674068e-01);
INSERT INTO "trial_intermediate_values" VALUES(28,3,80,5.33333333333333325931e-01);
INSERT INTO "trial_intermediate_values" VALUES(29,3,90,0.6);
INSERT INTO "trial_intermediate_values" VALUES(30,3,100,6.66666666666666629659e-01);
INSERT INTO "trial_intermediate_values" VALUES(31,4,10,2.35702260395515873769e-02);
INSERT INTO "trial_intermediate_values" VALUES(32,4,20,4.71404520791031747539e-02);
INSERT INTO "trial_intermediate_values" VALUES(33,4,30,7.07106781186547656004e-02);
INSERT INTO "trial_intermediate_values" VALUES(34,4,40,9.42809041582063495079e-02);
INSERT INTO "trial_intermediate_values" VALUES(35,4,50,1.17851130197757919537e-01);
INSERT INTO "trial_intermediate_values" VALUES(36,4,60,1.414213562373095312e-01);
INSERT INTO "trial_intermediate_values" VALUES(37,4,70,1.64991582276861115108e-01);
INSERT INTO "trial_intermediate_values" VALUES(38,4,80,1.88561808316412699015e-01);
INSERT INTO "trial_intermediate_values" VALUES(39,4,90,2.12132034355964282923e-01);
INSERT INTO "trial_intermediate_values" VALUES(40,4,100,2.35702260395515839075e-01);
INSERT INTO "trial_intermediate_values" VALUES(41,5,10,4.71404520791031747539e-02);
INSERT INTO "trial_intermediate_values" VALUES(42,5,20,9.42809041582063495079e-02);
INSERT INTO "trial_intermediate_values" VALUES(43,5,30,1.414213562373095312e-01);
INSERT INTO "trial_intermediate_values" VALUES(44,5,40,1.88561808316412699015e-01);
INSERT INTO "trial_intermediate_values" VALUES(45,5,50,2.35702260395515839075e-01);
INSERT INTO "trial_intermediate_values" VALUES(46,5,60,2.82842712474619062401e-01);
INSERT INTO "trial_intermediate_values" VALUES(47,5,70,3.29983164553722230216e-01);
INSERT INTO "trial_intermediate_values" VALUES(48,5,80,3.77123616632825398031e-01);
INSERT INTO "trial_intermediate_values" VALUES(49,5,90,4.24264068711928565846e-01);
INSERT INTO "trial_intermediate_values" VALUES(50,5,100,4.7140452079103167815e-01);
INSERT INTO "trial_intermediate_values" VALUES(51,6,10,9.42809041582063495079e-02);
INSERT INTO "trial_intermediate_values" VALUES(52,6,20,1.88561808316412699015e-01);
INSERT INTO "trial_intermediate_values" VALUES(53,6,30,2.82842712474619062401e-01);
INSERT INTO "trial_intermediate_values" VALUES(54,6,40,3.77123616632825398031e-01);
INSERT INTO "trial_intermediate_values" VALUES(55,6,50,4.7140452079103167815e-01);
INSERT INTO "trial_intermediate_values" VALUES(56,6,60,5.65685424949238124803e-01);
INSERT INTO "trial_intermediate_values" VALUES(57,6,70,6.59966329107444460433e-01);
INSERT INTO "trial_intermediate_values" VALUES(58,6,80,7.54247233265650796063e-01);
INSERT INTO "trial_intermediate_values" VALUES(59,6,90,8.48528137423857131693e-01);
INSERT INTO "trial_intermediate_values" VALUES(60,6,100,9.42809041582063356301e-01);
INSERT INTO "trial_intermediate_values" VALUES(61,7,10,3.33333333333333328707e-02);
INSERT INTO "trial_intermediate_values" VALUES(62,7,20,6.66666666666666657414e-02);
INSERT INTO "trial_intermediate_values" VALUES(63,7,30,0.1);
INSERT INTO "trial_intermediate_values" VALUES(64,7,40,1.33333333333333331482e-01);
INSERT INTO "trial_intermediate_values" VALUES(65,7,50,1.66666666666666657414e-01);
INSERT INTO "trial_intermediate_values" VALUES(66,7,60,0.2);
INSERT INTO "trial_intermediate_values" VALUES(67,7,70,2.33333333333333337034e-01);
INSERT INTO "trial_intermediate_values" VALUES(68,7,80,2.66666666666666662965e-01);
INSERT INTO "trial_intermediate_values" VALUES(69,7,90,0.3);
INSERT INTO "trial_intermediate_values" VALUES(70,7,100,3.33333333333333314829e-01);
INSERT INTO "trial_intermediate_values" VALUES(71,8,10,6.66666666666666657414e-02);
INSERT INTO "trial_intermediate_values" VALUES(72,8,20,1.33333333333333331482e-01);
INSERT INTO "trial_intermediate_values" VALUES(73,8,30,0.2);
INSERT INTO "trial_intermediate_values" VALUES(74,8,40,2.66666666666666662965e-01);
INSERT INTO "trial_intermediate_values" VALUES(75,8,50,3.33333333333333314829e-01);
INSERT INTO "trial_intermediate_values" VALUES(76,8,60,0.4);
INSERT INTO "trial_intermediate_values" VALUES(77,8,70,4.66666666666666674068e-01);
INSERT INTO "trial_intermediate_values" VALUES(78,8,80,5.33333333333333325931e-01);
INSERT INTO "trial_intermediate_values" VALUES(79,8,90,0.6);
INSERT INTO "trial_intermediate_values" VALUES(80,8,100,6.66666666666666629659e-01);
INSERT INTO "trial_intermediate_values" VALUES(81,9,10,1.33333333333333331482e-01);
INSERT INTO "trial_intermediate_values" VALUES(82,9,20,2.66666666666666662965e-01);
INSERT INTO "trial_intermediate_values" VALUES(83,9,30,0.4);
INSERT INTO "trial_intermediate_values" VALUES(84,9,40,5.33333333333333325931e-01);
INSERT INTO "trial_intermediate_values" VALUES(85,9,50,6.66666666666666629659e-01);
INSERT INTO "trial_intermediate_values" VALUES(86,9,60,0.8);
INSERT INTO "trial_intermediate_values" VALUES(87,9,70,9.33333333333333348136e-01);
INSERT INTO "trial_intermediate_values" VALUES(88,9,80,1.06666666666666665186e+00);
INSERT INTO "trial_intermediate_values" VALUES(89,9,90,1.2);
INSERT INTO "trial_intermediate_values" VALUES(90,9,100,1.33333333333333325931e+00);
CREATE TABLE trial_params (
	param_id INTEGER NOT NULL, 
	trial_id INTEGER, 
	param_name VARCHAR(512), 
	param_value FLOAT, 
	distribution_json TEXT, 
	PRIMARY KEY (param_id), 
	UNIQUE (trial_id, param_name), 
	FOREIGN KEY(trial_id) REFERENCES trials (trial_id)
);
INSERT INTO "trial_params" VALUES(1,1,'batch_size',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [16, 32, 64]}}');
INSERT INTO "trial_params" VALUES(2,1,'lr',0.05,'{"name": "UniformDistribution", "attributes": {"low": 0.01, "high": 0.2}}');
INSERT INTO "trial_params" VALUES(3,2,'batch_size',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [16, 32, 64]}}');
INSERT INTO "trial_params" VALUES(4,2,'lr',0.1,'{"name": "UniformDistribution", "attributes": {"low": 0.01, "high": 0.2}}');
INSERT INTO "trial_params" VALUES(5,3,'batch_size',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [16, 32, 64]}}');
INSERT INTO "trial_params" VALUES(6,3,'lr',0.2,'{"name": "UniformDistribution", "attributes": {"low": 0.01, "high": 0.2}}');
INSERT INTO "trial_params" VALUES(7,4,'batch_size',1.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [16, 32, 64]}}');
INSERT INTO "trial_params" VALUES(8,4,'lr',0.05,'{"name": "UniformDistribution", "attributes": {"low": 0.01, "high": 0.2}}');
INSERT INTO "trial_params" VALUES(9,5,'batch_size',1.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [16, 32, 64]}}');
INSERT INTO "trial_params" VALUES(10,5,'lr',0.1,'{"name": "UniformDistribution", "attributes": {"low": 0.01, "high": 0.2}}');
INSERT INTO "trial_params" VALUES(11,6,'batch_size',1.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [16, 32, 64]}}');
INSERT INTO "trial_params" VALUES(12,6,'lr',0.2,'{"name": "UniformDistribution", "attributes": {"low": 0.01, "high": 0.2}}');
INSERT INTO "trial_params" VALUES(13,7,'batch_size',2.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [16, 32, 64]}}');
INSERT INTO "trial_params" VALUES(14,7,'lr',0.05,'{"name": "UniformDistribution", "attributes": {"low": 0.01, "high": 0.2}}');
INSERT INTO "trial_params" VALUES(15,8,'batch_size',2.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [16, 32, 64]}}');
INSERT INTO "trial_params" VALUES(16,8,'lr',0.1,'{"name": "UniformDistribution", "attributes": {"low": 0.01, "high": 0.2}}');
INSERT INTO "trial_params" VALUES(17,9,'batch_size',2.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [16, 32, 64]}}');
INSERT INTO "trial_params" VALUES(18,9,'lr',0.2,'{"name": "UniformDistribution", "attributes": {"low": 0.01, "high": 0.2}}');
CREATE TABLE trial_system_attributes (
	trial_system_attribute_id INTEGER NOT NULL, 
	trial_id INTEGER, 
	"key" VARCHAR(512), 
	value_json TEXT, 
	PRIMARY KEY (trial_system_attribute_id), 
	UNIQUE (trial_id, "key"), 
	FOREIGN KEY(trial_id) REFERENCES trials (trial_id)
);
INSERT INTO "trial_system_attributes" VALUES(1,1,'fixed_params','{"batch_size": 16, "lr": 0.05}');
INSERT INTO "trial_system_attributes" VALUES(2,2,'fixed_params','{"batch_size": 16, "lr": 0.1}');
INSERT INTO "trial_system_attributes" VALUES(3,3,'fixed_params','{"batch_size": 16, "lr": 0.2}');
INSERT INTO "trial_system_attributes" VALUES(4,4,'fixed_params','{"batch_size": 32, "lr": 0.05}');
INSERT INTO "trial_system_attributes" VALUES(5,5,'fixed_params','{"batch_size": 32, "lr": 0.1}');
INSERT INTO "trial_system_attributes" VALUES(6,6,'fixed_params','{"batch_size": 32, "lr": 0.2}');
INSERT INTO "trial_system_attributes" VALUES(7,7,'fixed_params','{"batch_size": 64, "lr": 0.05}');
INSERT INTO "trial_system_attributes" VALUES(8,8,'fixed_params','{"batch_size": 64, "lr": 0.1}');
INSERT INTO "trial_system_attributes" VALUES(9,9,'fixed_params','{"batch_size": 64, "lr": 0.2}');
CREATE TABLE trial_user_attributes (
	trial_user_attribute_id INTEGER NOT NULL, 
	trial_id INTEGER, 
	"key" VARCHAR(512), 
	value_json TEXT, 
	PRIMARY KEY (trial_user_attribute_id), 
	UNIQUE (trial_id, "key"), 
	FOREIGN KEY(trial_id) REFERENCES trials (trial_id)
);
CREATE TABLE trial_values (
	trial_value_id INTEGER NOT NULL, 
	trial_id INTEGER NOT NULL, 
	objective INTEGER NOT NULL, 
	value FLOAT NOT NULL, 
	PRIMARY KEY (trial_value_id), 
	UNIQUE (trial_id, objective), 
	FOREIGN KEY(trial_id) REFERENCES trials (trial_id)
);
INSERT INTO "trial_values" VALUES(1,1,0,1.66666666666666657414e-01);
INSERT INTO "trial_values" VALUES(2,2,0,3.33333333333333314829e-01);
INSERT INTO "trial_values" VALUES(3,3,0,6.66666666666666629659e-01);
INSERT INTO "trial_values" VALUES(4,4,0,2.35702260395515839075e-01);
INSERT INTO "trial_values" VALUES(5,5,0,4.7140452079103167815e-01);
INSERT INTO "trial_values" VALUES(6,6,0,9.42809041582063356301e-01);
INSERT INTO "trial_values" VALUES(7,7,0,3.33333333333333314829e-01);
INSERT INTO "trial_values" VALUES(8,8,0,6.66666666666666629659e-01);
INSERT INTO "trial_values" VALUES(9,9,0,1.33333333333333325931e+00);
CREATE TABLE trials (
	trial_id INTEGER NOT NULL, 
	number INTEGER, 
	study_id INTEGER, 
	state VARCHAR(8) NOT NULL, 
	datetime_start DATETIME, 
	datetime_complete DATETIME, 
	PRIMARY KEY (trial_id), 
	FOREIGN KEY(study_id) REFERENCES studies (study_id)
);
INSERT INTO "trials" VALUES(1,0,1,'COMPLETE','2026-11-29 19:13:11.802670','2026-11-29 19:13:12.463628');
INSERT INTO "trials" VALUES(2,1,1,'COMPLETE','2026-11-29 19:13:12.528293','2026-11-29 19:13:13.015707');
INSERT INTO "trials" VALUES(3,2,1,'COMPLETE','2026-11-29 19:13:13.083932','2026-11-29 19:13:14.011783');
INSERT INTO "trials" VALUES(4,3,1,'COMPLETE','2026-11-29 19:13:14.067230','2026-11-29 19:13:14.545124');
INSERT INTO "trials" VALUES(5,4,1,'COMPLETE','2026-11-29 19:13:14.590661','2026-11-29 19:13:14.943761');
INSERT INTO "trials" VALUES(6,5,1,'COMPLETE','2026-11-29 19:13:14.979794','2026-11-29 19:13:15.276089');
INSERT INTO "trials" VALUES(7,6,1,'COMPLETE','2026-11-29 19:13:15.316640','2026-11-29 19:13:15.883288');
INSERT INTO "trials" VALUES(8,7,1,'COMPLETE','2026-11-29 19:13:15.938370','2026-11-29 19:13:16.441152');
INSERT INTO "trials" VALUES(9,8,1,'COMPLETE','2026-11-29 19:13:16.505415','2026-11-29 19:13:17.043266');
CREATE TABLE version_info (
	version_info_id INTEGER NOT NULL, 
	schema_version INTEGER, 
	library_version VARCHAR(256), 
	PRIMARY KEY (version_info_id), 
	CHECK (version_info_id=1)
);
INSERT INTO "version_info" VALUES(1,12,'2.10.1');
CREATE UNIQUE INDEX ix_studies_study_name ON studies (study_name);
COMMIT;
